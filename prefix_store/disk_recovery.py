"""What a restart finds in a disk tier's directory. No file of a record is read but for the salt in
the tail of first blocks; payloads are checked when they are read."""

from __future__ import annotations

import heapq
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from prefix_store.backend import KeptBlock
from prefix_store.base import BlockHash
from prefix_store.disk_file import FOOTER_BYTES, BlockFile, FileName, parse_name, read_salt


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file that has the name and the length of a record's."""

    file: BlockFile
    used_ns: int
    """When it was read last, or else written."""


@dataclass(frozen=True, slots=True)
class Found:
    """A directory's content."""

    files: dict[BlockHash, FoundFile]
    junk: dict[str, int]
    """Names of all other files, and the bytes that they take."""


def scan(directory: int, size_of: Callable[[int], int]) -> Found:
    """List a directory; directories in it are left alone, as they are not ours. Raises OSError when
    it cannot be listed."""
    with os.scandir(directory) as listing:
        entries = sorted(listing, key=os.DirEntry.inode)  # as they lie on the disk
    found = Found({}, {})
    for entry in entries:
        status = _status_of(entry)
        if status is None or stat.S_ISDIR(status.st_mode):
            continue
        file = _recognise(directory, entry.name, status, size_of)
        if file is None or file.file.block.block_hash in found.files:
            found.junk[entry.name] = status.st_blocks * 512
        else:
            found.files[file.file.block.block_hash] = file
    return found


def closed(files: Mapping[BlockHash, FoundFile]) -> dict[BlockHash, FoundFile]:
    """Those of `files` whose ancestors are all there, parents before their children and otherwise
    in the order of their last use, oldest first."""
    children: dict[BlockHash | None, list[BlockHash]] = {}
    for block_hash, found in files.items():
        children.setdefault(found.file.block.parent, []).append(block_hash)
    reachable = list(children.get(None, ()))
    for block_hash in reachable:  # grows while it is walked
        reachable.extend(children.get(block_hash, ()))
    ordered: dict[BlockHash, FoundFile] = {}
    for block_hash in sorted(reachable, key=lambda each: files[each].used_ns):
        lineage: list[FoundFile] = []
        at: BlockHash | None = block_hash
        while at is not None and at not in ordered:
            lineage.append(files[at])
            at = files[at].file.block.parent
        ordered.update((found.file.block.block_hash, found) for found in reversed(lineage))
    return ordered


def surplus(files: Mapping[BlockHash, FoundFile], capacity_bytes: int) -> list[BlockHash]:
    """What has to go so that the rest of a closed set fits and stays closed: childless blocks, the
    longest unused first."""
    excess = sum(found.file.block.num_bytes for found in files.values()) - capacity_bytes
    if excess <= 0:
        return []
    num_children = dict.fromkeys(files, 0)
    for found in files.values():
        if found.file.block.parent is not None:
            num_children[found.file.block.parent] += 1
    childless = [(files[each].used_ns, each) for each, count in num_children.items() if not count]
    heapq.heapify(childless)
    gone: list[BlockHash] = []
    while excess > 0 and childless:
        used_ns, block_hash = heapq.heappop(childless)
        block = files[block_hash].file.block
        gone.append(block_hash)
        excess -= block.num_bytes
        if block.parent is not None:
            num_children[block.parent] -= 1
            if not num_children[block.parent]:
                last_use = max(used_ns, files[block.parent].used_ns)
                heapq.heappush(childless, (last_use, block.parent))
    return gone


def _status_of(entry: os.DirEntry[str]) -> os.stat_result | None:
    try:
        return entry.stat(follow_symlinks=False)
    except OSError:
        return None


def _recognise(
    directory: int, name: str, status: os.stat_result, size_of: Callable[[int], int]
) -> FoundFile | None:
    parsed = parse_name(name)
    if parsed is None or not stat.S_ISREG(status.st_mode):
        return None
    salt = _salt_of(directory, name, parsed, status.st_size)
    if salt is None:
        return None
    num_bytes = size_of(parsed.record_bytes)
    block = KeptBlock(
        parsed.block_hash, parsed.parent, parsed.num_tokens, num_bytes, salt,
        record_bytes=parsed.record_bytes,
    )  # fmt: skip
    file = BlockFile(block, parsed.record_bytes)
    if file.name != name or file.num_bytes != status.st_size:  # such as leading zeros
        return None
    return FoundFile(file, status.st_mtime_ns)


def _salt_of(directory: int, name: str, parsed: FileName, file_bytes: int) -> str | None:
    """None when the file is torn."""
    if parsed.parent is None:
        try:
            return read_salt(directory, name, file_bytes)
        except OSError:
            return None
    return "" if file_bytes == parsed.record_bytes + FOOTER_BYTES else None

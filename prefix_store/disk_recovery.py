"""What a restart finds in a disk tier's directory. Payloads are not read: they are checked when
somebody asks for them."""

from __future__ import annotations

import heapq
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from prefix_store.backend import KeptBlock
from prefix_store.base import BlockHash
from prefix_store.disk_file import parse_name, read_block

THREADS = 4
"""That wait for the disk at the same time."""


@dataclass(frozen=True, slots=True)
class FoundBlock:
    """A record's file."""

    block: KeptBlock
    used_ns: int
    """When it was read last, or else written."""


@dataclass(frozen=True, slots=True)
class Found:
    """A directory's content."""

    blocks: dict[BlockHash, FoundBlock]
    junk: dict[str, int]
    """Names of all other files, and the bytes that they take."""


def scan(directory: int, size_of: Callable[[int], int]) -> Found:
    """Look at every file; directories among them are left alone, as they are not ours. Raises
    OSError when the directory cannot be listed."""
    with os.scandir(directory) as listing:
        entries = sorted(listing, key=lambda entry: entry.inode())  # about as they lie on the disk

    def look_at(share: Sequence[os.DirEntry[str]]) -> Found:
        return _look_at(directory, share, size_of)

    shares = [entries[first::THREADS] for first in range(THREADS)]
    found = Found({}, {})
    with ThreadPoolExecutor(THREADS, thread_name_prefix="headstart-recover") as threads:
        for part in threads.map(look_at, shares):
            found.blocks.update(part.blocks)
            found.junk.update(part.junk)
    return found


def closed(blocks: Mapping[BlockHash, FoundBlock]) -> dict[BlockHash, FoundBlock]:
    """Those of `blocks` whose ancestors are all there, parents before their children and otherwise
    in the order of their last use, oldest first."""
    children: dict[BlockHash | None, list[BlockHash]] = {}
    for block_hash, found in blocks.items():
        children.setdefault(found.block.parent, []).append(block_hash)
    reachable = list(children.get(None, ()))
    for block_hash in reachable:  # grows while it is walked
        reachable.extend(children.get(block_hash, ()))
    ordered: dict[BlockHash, FoundBlock] = {}
    for block_hash in sorted(reachable, key=lambda each: blocks[each].used_ns):
        lineage: list[FoundBlock] = []
        at: BlockHash | None = block_hash
        while at is not None and at not in ordered:
            lineage.append(blocks[at])
            at = blocks[at].block.parent
        ordered.update((found.block.block_hash, found) for found in reversed(lineage))
    return ordered


def surplus(blocks: Mapping[BlockHash, FoundBlock], capacity_bytes: int) -> list[BlockHash]:
    """What has to go so that the rest of a closed set fits and stays closed: childless blocks, the
    longest unused first."""
    excess = sum(found.block.num_bytes for found in blocks.values()) - capacity_bytes
    if excess <= 0:
        return []
    num_children = dict.fromkeys(blocks, 0)
    for found in blocks.values():
        if found.block.parent is not None:
            num_children[found.block.parent] += 1
    childless = [(blocks[each].used_ns, each) for each, count in num_children.items() if not count]
    heapq.heapify(childless)
    gone: list[BlockHash] = []
    while excess > 0 and childless:
        used_ns, block_hash = heapq.heappop(childless)
        block = blocks[block_hash].block
        gone.append(block_hash)
        excess -= block.num_bytes
        if block.parent is not None:
            num_children[block.parent] -= 1
            if not num_children[block.parent]:
                last_use = max(used_ns, blocks[block.parent].used_ns)
                heapq.heappush(childless, (last_use, block.parent))
    return gone


def _look_at(
    directory: int, entries: Sequence[os.DirEntry[str]], size_of: Callable[[int], int]
) -> Found:
    found = Found({}, {})
    for entry in entries:
        try:
            status = entry.stat(follow_symlinks=False)
        except OSError:
            continue
        if stat.S_ISDIR(status.st_mode):
            continue
        block = _recognise(directory, entry.name, status)
        if block is None:
            found.junk[entry.name] = status.st_blocks * 512
        else:
            block = replace(block, num_bytes=size_of(block.record_bytes))
            found.blocks[block.block_hash] = FoundBlock(block, status.st_mtime_ns)
    return found


def _recognise(directory: int, name: str, status: os.stat_result) -> KeptBlock | None:
    block_hash = parse_name(name)
    if block_hash is None or not stat.S_ISREG(status.st_mode):
        return None
    try:
        return read_block(directory, block_hash, status.st_size)
    except OSError:
        return None

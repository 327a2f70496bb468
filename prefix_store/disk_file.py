"""How one record lies in a file of the disk tier, and the file's name.

The name tells a restart what the catalogue has to know, so that no file has to be opened for it:

    <hash>-<parent>-<tokens>-<bytes of the record>      hash and parent in hex, or "first"

The file is the record, the tenant's salt (first blocks only), and a footer:

0   magic            8 bytes  b"HSDISK01"
8   record_bytes     8 bytes
16  header checksum  8 bytes  xxh3_64 of all of the record that stands before its payload
24  salt_bytes       4 bytes
28  reserved         4 bytes  0
32  checksum         8 bytes  xxh3_64 of hash, salt and the 32 bytes above
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from prefix_store.backend import KeptBlock
from prefix_store.base import BlockHash
from prefix_store.record import RecordHeader, is_intact, read_header

MAGIC = b"HSDISK01"
MAX_SALT_BYTES = 512
TEMPORARY_PREFIX = "tmp-"

_FIELDS = struct.Struct("<8sQQII")
_CHECKSUM = struct.Struct("<Q")
FOOTER_BYTES = _FIELDS.size + _CHECKSUM.size
_NAME = re.compile(r"([0-9a-f]{32})-([0-9a-f]{32}|first)-([0-9]{1,9})-([0-9]{1,15})")


@dataclass(frozen=True, slots=True)
class BlockFile:
    """A record's file, as its name tells it; the salt is told by the footer."""

    block: KeptBlock
    record_bytes: int

    @property
    def name(self) -> str:
        block = self.block
        parent = block.parent.hex() if block.parent is not None else "first"
        return f"{block.block_hash.hex()}-{parent}-{block.num_tokens}-{self.record_bytes}"

    @property
    def num_bytes(self) -> int:
        """Length of the file."""
        return self.record_bytes + len(encode_salt(self.block.salt)) + FOOTER_BYTES


@dataclass(frozen=True, slots=True)
class FileName:
    """A file's name, taken apart."""

    block_hash: BlockHash
    parent: BlockHash | None
    num_tokens: int
    record_bytes: int


def parse_name(name: str) -> FileName | None:
    """None when it is not the name of a record's file."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    block_hash, parent, num_tokens, record_bytes = match.groups()
    above = None if parent == "first" else BlockHash(bytes.fromhex(parent))
    return FileName(BlockHash(bytes.fromhex(block_hash)), above, int(num_tokens), int(record_bytes))


def encode_salt(salt: str) -> bytes:
    return salt.encode("utf-8", "surrogatepass")


def is_record_of(record: memoryview, block: KeptBlock) -> RecordHeader | None:
    """The record's header when it names exactly this block; the payload is not looked at."""
    header = read_header(record)
    if (
        header is None
        or header.block_hash != block.block_hash
        or header.shape.num_tokens != block.num_tokens
        or (block.parent is not None and header.parent != block.parent)
    ):
        return None
    return header


def write_file(directory: int, name: str, file: BlockFile, record: memoryview) -> None:
    """Write a record under `name`, which must be new. Raises OSError."""
    fd = os.open(
        name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=directory
    )
    try:
        _write_all(fd, (record, memoryview(_tail(file, record))))
    finally:
        os.close(fd)


def read_file(directory: int, file: BlockFile, into: memoryview) -> bool:
    """Read a record; False when anything in the file is not what was written. Marks the file as
    used now. Raises OSError."""
    tail = bytearray(file.num_bytes - file.record_bytes + 1)  # one more: a longer file is not ours
    fd = os.open(file.name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=directory)
    try:
        if _read_all(fd, (into, memoryview(tail))) != file.num_bytes:
            return False
        header = is_record_of(into, file.block)
        if (
            header is None
            or bytes(tail[:-1]) != _tail(file, into)
            or not is_intact(into, header.block_hash, header.shape)
        ):
            return False
        _touch(fd)
    finally:
        os.close(fd)
    return True


def read_salt(directory: int, name: str, file_bytes: int) -> str | None:
    """The salt in a file's tail; None when the tail is not intact. Raises OSError."""
    parsed = parse_name(name)
    if parsed is None:
        return None
    salt_bytes = file_bytes - parsed.record_bytes - FOOTER_BYTES
    if not 0 <= salt_bytes <= MAX_SALT_BYTES:
        return None
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=directory)
    try:
        tail = os.pread(fd, salt_bytes + FOOTER_BYTES, parsed.record_bytes)
    finally:
        os.close(fd)
    if len(tail) != salt_bytes + FOOTER_BYTES:
        return None
    (header_checksum,) = _CHECKSUM.unpack_from(tail, salt_bytes + 16)
    salt = tail[:salt_bytes]
    if tail != _tail_of(parsed.block_hash, parsed.record_bytes, salt, header_checksum):
        return None
    try:
        return salt.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return None


def _tail(file: BlockFile, record: memoryview) -> bytes:
    header = read_header(record)
    before_payload = record[: header.shape.payload_at] if header is not None else record[:0]
    checksum = xxhash.xxh3_64_intdigest(before_payload)
    block = file.block
    return _tail_of(block.block_hash, file.record_bytes, encode_salt(block.salt), checksum)


def _tail_of(block_hash: BlockHash, record_bytes: int, salt: bytes, header_checksum: int) -> bytes:
    fields = _FIELDS.pack(MAGIC, record_bytes, header_checksum, len(salt), 0)
    return salt + fields + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(block_hash + salt + fields))


def _touch(fd: int) -> None:
    """The time of last use, by which a restart orders the catalogue. It may fail, as on a medium
    that has become read-only: the record is good all the same."""
    try:
        os.utime(fd)
    except OSError:
        return


def _write_all(fd: int, parts: Sequence[memoryview]) -> None:
    position, todo = 0, list(parts)
    while todo:
        written = os.pwritev(fd, todo, position)
        position += written
        todo = _after(todo, written)


def _read_all(fd: int, parts: Sequence[memoryview]) -> int:
    position, todo = 0, list(parts)
    while todo:
        got = os.preadv(fd, todo, position)
        if got == 0:
            break
        position += got
        todo = _after(todo, got)
    return position


def _after(parts: Sequence[memoryview], num_bytes: int) -> list[memoryview]:
    """What is left of `parts` after their first `num_bytes` bytes."""
    left: list[memoryview] = []
    for part in parts:
        if num_bytes < len(part):
            left.append(part[num_bytes:])
        num_bytes = max(0, num_bytes - len(part))
    return left

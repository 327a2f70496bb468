"""How one record lies in a file of the disk tier. The file's name is the block's hash in hex.

0   magic            8 bytes  b"HSDISK01"
8   record_bytes     8 bytes  little-endian, as all numbers
16  header checksum  8 bytes  xxh3_64 of all of the record that stands before its payload
24  salt_bytes       4 bytes
28  flags            4 bytes  1: the first block of a prompt
32  checksum         8 bytes  xxh3_64 of hash, salt and the 32 bytes above
40  salt             UTF-8, padded to a multiple of 64
    record           to the end of the file

A restart reads this far and the record's header, and knows all that the catalogue needs.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from contextlib import suppress

import xxhash

from prefix_store.backend import KeptBlock
from prefix_store.base import HASH_BYTES, BlockHash
from prefix_store.disk_direct import AlignedBuffers
from prefix_store.record import RecordHeader, is_intact, peek_header, read_header

MAGIC = b"HSDISK01"
MAX_SALT_BYTES = 512
TEMPORARY_PREFIX = "tmp-"

_FIELDS = struct.Struct("<8sQQII")
_CHECKSUM = struct.Struct("<Q")
_SALT_AT = _FIELDS.size + _CHECKSUM.size
_FIRST = 1
_HEAD_BYTES = 4096
"""Read at a restart: enough unless a block has many hundreds of tokens."""

FRONT_BYTES = _SALT_AT + MAX_SALT_BYTES + 64
"""The most that a file holds beside its record."""


def file_name(block_hash: BlockHash) -> str:
    return block_hash.hex()


def parse_name(name: str) -> BlockHash | None:
    """None when it is not the name of a record's file."""
    try:
        block_hash = BlockHash(bytes.fromhex(name))
    except ValueError:
        return None
    return block_hash if len(block_hash) == HASH_BYTES and block_hash.hex() == name else None


def encode_salt(salt: str) -> bytes:
    return salt.encode("utf-8", "surrogatepass")


def file_bytes(block: KeptBlock) -> int:
    """Length of a block's file."""
    return _record_at(len(encode_salt(block.salt))) + block.record_bytes


def header_of(record: memoryview, block: KeptBlock) -> RecordHeader | None:
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


def write_file(
    directory: int,
    name: str,
    block: KeptBlock,
    record: memoryview,
    buffers: AlignedBuffers | None = None,
) -> None:
    """Write a record under `name`, which must be new; past the page cache where `buffers` are
    given. Raises OSError."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    parts = (memoryview(_front(block, record)), record)
    fd = os.open(name, flags | (os.O_DIRECT if buffers else 0), 0o600, dir_fd=directory)
    try:
        if buffers is None:
            _write_all(fd, parts)
        else:
            _write_all(fd, (buffers.gather(parts),))
            os.ftruncate(fd, sum(map(len, parts)))
    finally:
        os.close(fd)


def read_file(directory: int, block: KeptBlock, into: memoryview) -> bool:
    """Read a record; False when anything in the file is not what was written. Marks the file as
    used now. Raises OSError."""
    front = bytearray(_record_at(len(encode_salt(block.salt))))
    beyond = bytearray(1)  # a longer file is not ours
    fd = _open_to_read(directory, block.block_hash)
    try:
        if _read_all(fd, (memoryview(front), into, memoryview(beyond))) != file_bytes(block):
            return False
        header = header_of(into, block)
        if (
            header is None
            or front != _front(block, into)
            or not is_intact(into, header.block_hash, header.shape)
        ):
            return False
        _touch(fd)
    finally:
        os.close(fd)
    return True


def read_block(directory: int, block_hash: BlockHash, length: int) -> KeptBlock | None:
    """What a file of `length` bytes says of its block, `num_bytes` left open; None when it is torn
    or not ours. Reads what stands before the payload. Raises OSError."""
    fd = _open_to_read(directory, block_hash)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # else 128 KiB are read ahead
        head = os.pread(fd, min(length, _HEAD_BYTES), 0)
        block = _parse_head(block_hash, head)
        if block is None and length > len(head):
            head = os.pread(fd, min(length, 64 * _HEAD_BYTES), 0)
            block = _parse_head(block_hash, head)
    finally:
        os.close(fd)
    return block if block is not None and file_bytes(block) == length else None


def _parse_head(block_hash: BlockHash, head: bytes) -> KeptBlock | None:
    if len(head) < _SALT_AT:
        return None
    magic, record_bytes, header_checksum, salt_bytes, flags = _FIELDS.unpack_from(head)
    record_at = _record_at(salt_bytes)
    if magic != MAGIC or len(head) <= record_at:
        return None
    first, salt = bool(flags & _FIRST), head[_SALT_AT : _SALT_AT + salt_bytes]
    front = _front_of(block_hash, record_bytes, header_checksum, salt, first)
    record = memoryview(head)[record_at:]
    header = peek_header(record)
    if (
        header is None
        or head[:record_at] != front
        or header.block_hash != block_hash
        or xxhash.xxh3_64_intdigest(record[: header.shape.payload_at]) != header_checksum
    ):
        return None
    return KeptBlock(
        block_hash,
        None if first else header.parent,
        header.shape.num_tokens,
        0,
        salt.decode("utf-8", "surrogatepass"),  # the checksum says that we encoded it
        header.token_ids,
        record_bytes,
    )


def _front(block: KeptBlock, record: memoryview) -> bytes:
    """What stands before this record in its file."""
    header = read_header(record)
    before_payload = record[: header.shape.payload_at] if header is not None else record[:0]
    checksum = xxhash.xxh3_64_intdigest(before_payload)
    salt, first = encode_salt(block.salt), block.parent is None
    return _front_of(block.block_hash, len(record), checksum, salt, first)


def _front_of(
    block_hash: BlockHash, record_bytes: int, header_checksum: int, salt: bytes, first: bool
) -> bytes:
    fields = _FIELDS.pack(MAGIC, record_bytes, header_checksum, len(salt), _FIRST if first else 0)
    checksum = _CHECKSUM.pack(xxhash.xxh3_64_intdigest(block_hash + salt + fields))
    return (fields + checksum + salt).ljust(_record_at(len(salt)), b"\0")


def _record_at(salt_bytes: int) -> int:
    return -(-(_SALT_AT + salt_bytes) // 64) * 64


def _open_to_read(directory: int, block_hash: BlockHash) -> int:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe in its place must not stop us
    return os.open(file_name(block_hash), flags, dir_fd=directory)


def _touch(fd: int) -> None:
    """The time of last use, by which a restart orders the catalogue. It may fail, as on a medium
    that has become read-only: the record is good all the same."""
    with suppress(OSError):
        os.utime(fd)


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

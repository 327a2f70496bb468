"""How a block lies in Redis: the record, the salt and a footer in one value; and its reference.

    record            as in every tier
    salt              UTF-8, only with the first block of a prompt
    footer, 32 bytes  magic 8, owner 8, is_first 1, nothing 1, salt length 2, record length 4,
                      checksum 8: xxh3_64 of the record's header, the salt and the footer up to here

The payload has its own checksum in the record's header. A reference is what a store keeps about
each block that it counts as its own: enough to find header and footer without the payload.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from prefix_store.backend import KeptBlock, OutgoingRecord
from prefix_store.base import BlockHash
from prefix_store.record import RecordHeader, RecordShape, is_intact, peek_header, read_header

MAGIC = b"HSREDIS1"
OWNER_BYTES = 8
_FOOTER = struct.Struct("<8s8sBxHIQ")
FOOTER_BYTES = _FOOTER.size
_CHECKSUM_BYTES = 8
_REFERENCE = struct.Struct("<III")

KEY_BYTES = 512
"""Per block: key, reference, entries of Redis' own tables. Measured: 250 to 350."""


@dataclass(frozen=True, slots=True)
class Footer:
    """The end of a value."""

    owner: bytes
    is_first: bool
    """The first block of a prompt."""
    salt_bytes: int
    record_bytes: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Reference:
    """What has to be known of a value to look at its ends only."""

    num_tokens: int
    record_bytes: int
    value_bytes: int

    def pack(self) -> bytes:
        return _REFERENCE.pack(self.num_tokens, self.record_bytes, self.value_bytes)

    @classmethod
    def unpack(cls, raw: bytes) -> Reference | None:
        return cls(*_REFERENCE.unpack(raw)) if len(raw) == _REFERENCE.size else None

    @property
    def head_bytes(self) -> int:
        """Of the record, before its payload."""
        return RecordShape(self.num_tokens, 0).payload_at


def owner_of(store_id: str) -> bytes:
    """How a store signs what it wrote."""
    return xxhash.xxh3_64_digest(store_id.encode())


def charged_bytes(record_bytes: int) -> int:
    """Memory that Redis needs for a record at most. Its allocator (jemalloc) has four sizes for
    each power of two, so up to a fifth of a large value is padding."""
    value_bytes = record_bytes + FOOTER_BYTES + 64
    step = max(64, 1 << max(0, (value_bytes - 1).bit_length() - 3))
    return -(-value_bytes // step) * step + KEY_BYTES


def close_value(record: OutgoingRecord, owner: bytes) -> bytes | None:
    """The value of a record; None when `data` is not that of the block."""
    block, data = record.block, record.data
    header = read_header(data)
    if header is None or header.block_hash != block.block_hash:
        return None
    salt = block.salt.encode()
    is_first = block.parent is None
    footer = _FOOTER.pack(MAGIC, owner, is_first, len(salt), len(data), 0)[:-_CHECKSUM_BYTES]
    checksum = _checksum(block.block_hash, data[: header.shape.payload_at], salt + footer)
    return b"".join((data, salt, footer, checksum.to_bytes(_CHECKSUM_BYTES, "little")))


def reference_of(record: OutgoingRecord) -> Reference:
    value_bytes = len(record.data) + len(record.block.salt.encode()) + FOOTER_BYTES
    return Reference(record.block.num_tokens, len(record.data), value_bytes)


def read_footer(end: bytes | memoryview) -> Footer | None:
    """From the end of a value; None when it is not one of ours."""
    if len(end) < FOOTER_BYTES:
        return None
    magic, owner, is_first, salt_bytes, record_bytes, checksum = _FOOTER.unpack(
        end[len(end) - FOOTER_BYTES :]
    )
    return Footer(owner, bool(is_first), salt_bytes, record_bytes, checksum) if (
        magic == MAGIC
    ) else None  # fmt: skip


def open_value(record: memoryview, tail: memoryview, block_hash: BlockHash) -> KeptBlock | None:
    """The block of a whole value, of which `tail` stands behind the record; None when anything
    about it is not as it was written."""
    block = read_ends(record, tail, block_hash)
    header = read_header(record)
    if block is None or header is None or header.shape.num_bytes != len(record):
        return None
    return block if is_intact(record, block_hash, header.shape) else None


def read_ends(head: memoryview, tail: memoryview, block_hash: BlockHash) -> KeptBlock | None:
    """The block from what stands before its payload (`head` may go on) and what comes after its
    record; the payload is not looked at."""
    header, footer = peek_header(head), read_footer(tail)
    if header is None or footer is None or header.block_hash != block_hash:
        return None
    if footer.record_bytes != header.shape.num_bytes:
        return None
    if len(tail) != footer.salt_bytes + FOOTER_BYTES:
        return None
    checksum = _checksum(
        block_hash, head[: header.shape.payload_at], bytes(tail[:-_CHECKSUM_BYTES])
    )
    if checksum != footer.checksum:
        return None
    return _kept(header, footer, bytes(tail[: footer.salt_bytes]))


def _kept(header: RecordHeader, footer: Footer, salt: bytes) -> KeptBlock:
    return KeptBlock(
        header.block_hash,
        None if footer.is_first else header.parent,
        header.shape.num_tokens,
        charged_bytes(footer.record_bytes),
        salt.decode(errors="replace"),
        header.token_ids,
        footer.record_bytes,
    )


def _checksum(block_hash: BlockHash, head: memoryview, rest: bytes) -> int:
    digest = xxhash.xxh3_64(head, seed=int.from_bytes(block_hash[:8], "little"))
    digest.update(rest)
    return digest.intdigest()

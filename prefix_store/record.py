"""How one block lies in a tier: a header with everything needed to check it, then the KV bytes.

0   magic        8 bytes  b"HSBLOCK1"
8   hash        16 bytes
24  parent      16 bytes  the root for the first block of a prompt
40  checksum     8 bytes  xxh3_64 of the payload, little-endian
48  num_tokens   4 bytes
52  payload_at   4 bytes  from the start of the record
56  payload      8 bytes  its length
64  token ids    4 bytes each, int32 little-endian, padded to a multiple of 64
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from prefix_store.base import BlockHash

MAGIC = b"HSBLOCK1"
_HEADER = struct.Struct("<8s16s16sQIIQ")
_CHECKSUM_AT = 40
_TOKENS_AT = _HEADER.size


@dataclass(frozen=True, slots=True)
class RecordShape:
    """Sizes of the records of one namespace."""

    num_tokens: int
    payload_bytes: int

    @property
    def payload_at(self) -> int:
        return -(-(_TOKENS_AT + 4 * self.num_tokens) // 64) * 64

    @property
    def num_bytes(self) -> int:
        return self.payload_at + self.payload_bytes


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """What stands before the payload."""

    block_hash: BlockHash
    parent: BlockHash
    checksum: int
    shape: RecordShape
    token_ids: bytes
    """int32, little-endian."""


def write_header(
    record: memoryview, block_hash: BlockHash, parent: BlockHash, tokens: bytes, shape: RecordShape
) -> None:
    """Write all but the checksum. `tokens`: the block's token ids as int32."""
    _HEADER.pack_into(
        record, 0, MAGIC, block_hash, parent, 0, shape.num_tokens, shape.payload_at,
        shape.payload_bytes,
    )  # fmt: skip
    record[_TOKENS_AT : _TOKENS_AT + len(tokens)] = tokens


def seal(record: memoryview, block_hash: BlockHash, shape: RecordShape) -> None:
    """Write the checksum of the payload that stands there now. It is bound to the block: whoever
    seals a place that was given to another block meanwhile cannot make it look intact."""
    struct.pack_into("<Q", record, _CHECKSUM_AT, payload_checksum(record, block_hash, shape))


def payload_checksum(record: memoryview, block_hash: BlockHash, shape: RecordShape) -> int:
    """xxh3_64 of the payload, with the hash's first 8 bytes as seed."""
    seed = int.from_bytes(block_hash[:8], "little")
    return xxhash.xxh3_64_intdigest(payload(record, shape), seed=seed)


def payload(record: memoryview, shape: RecordShape) -> memoryview:
    return record[shape.payload_at : shape.payload_at + shape.payload_bytes]


def read_header(record: memoryview) -> RecordHeader | None:
    """None when these bytes are not a record."""
    header = peek_header(record)
    return header if header is not None and len(record) >= header.shape.num_bytes else None


def peek_header(head: memoryview) -> RecordHeader | None:
    """From a record's first bytes, as many as stand before its payload. None when they are not
    those of a record, or too few."""
    if len(head) < _HEADER.size:
        return None
    magic, block_hash, parent, checksum, num_tokens, payload_at, payload_bytes = (
        _HEADER.unpack_from(head)
    )
    shape = RecordShape(num_tokens, payload_bytes)
    if magic != MAGIC or payload_at != shape.payload_at or len(head) < payload_at:
        return None
    tokens = bytes(head[_TOKENS_AT : _TOKENS_AT + 4 * num_tokens])
    return RecordHeader(BlockHash(block_hash), BlockHash(parent), checksum, shape, tokens)


def is_block(record: memoryview, block_hash: BlockHash, tokens: bytes, shape: RecordShape) -> bool:
    """Whether the header is that of exactly this block: hash, token ids and sizes."""
    header = read_header(record)
    return (
        header is not None
        and header.block_hash == block_hash
        and header.token_ids == tokens
        and header.shape == shape
    )


def is_intact(record: memoryview, block_hash: BlockHash, shape: RecordShape) -> bool:
    """Whether the payload is still what was sealed for this block."""
    (stored,) = struct.unpack_from("<Q", record, _CHECKSUM_AT)
    return bool(stored == payload_checksum(record, block_hash, shape))

"""Block records: what is written is recognised, what is damaged is not."""

from __future__ import annotations

import pytest

from prefix_store.base import BlockHash
from prefix_store.record import (
    RecordShape,
    is_block,
    is_intact,
    payload,
    read_header,
    seal,
    write_header,
)

SHAPE = RecordShape(num_tokens=4, payload_bytes=200)
TOKENS = bytes(range(16))
HASH, PARENT = BlockHash(b"h" * 16), BlockHash(b"p" * 16)


def sealed() -> memoryview:
    record = memoryview(bytearray(SHAPE.num_bytes))
    write_header(record, HASH, PARENT, TOKENS, SHAPE)
    payload(record, SHAPE)[:] = b"x" * 200
    seal(record, HASH, SHAPE)
    return record


def test_a_sealed_record_reads_back() -> None:
    """Header, token ids and checksum survive."""
    header = read_header(sealed())
    assert header is not None
    assert (header.block_hash, header.parent, header.token_ids) == (HASH, PARENT, TOKENS)
    assert header.shape == SHAPE
    assert is_block(sealed(), HASH, TOKENS, SHAPE)
    assert is_intact(sealed(), HASH, SHAPE)


def test_a_hash_collision_is_a_miss() -> None:
    """The same hash with other token ids is another block."""
    assert not is_block(sealed(), HASH, bytes(16), SHAPE)


@pytest.mark.parametrize("at", [0, 9, 48, 52, 57])
def test_a_damaged_header_is_no_block(at: int) -> None:
    """Any field that matters."""
    record = sealed()
    record[at] ^= 0xFF
    assert not is_block(record, HASH, TOKENS, SHAPE)


@pytest.mark.parametrize("at", [0, 99, 199])
def test_one_flipped_bit_of_the_payload_is_noticed(at: int) -> None:
    """First, middle and last byte."""
    record = sealed()
    payload(record, SHAPE)[at] ^= 1
    assert not is_intact(record, HASH, SHAPE)


def test_a_payload_sealed_for_another_block_is_not_intact() -> None:
    """A writer that stood still and seals a place that belongs to another block by now."""
    record = sealed()
    payload(record, SHAPE)[:] = b"y" * 200
    seal(record, BlockHash(b"o" * 16), SHAPE)
    assert is_block(record, HASH, TOKENS, SHAPE)
    assert not is_intact(record, HASH, SHAPE)


def test_arbitrary_bytes_are_no_record() -> None:
    """Too short, or without the magic, or longer than what is there."""
    assert read_header(memoryview(b"")) is None
    assert read_header(memoryview(bytes(500))) is None
    assert read_header(sealed()[:100]) is None


def test_payloads_start_on_cache_lines() -> None:
    """Copies are fastest there."""
    assert all(RecordShape(n, 64).payload_at % 64 == 0 for n in (1, 16, 32, 100))

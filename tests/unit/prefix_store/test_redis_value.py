"""How a block lies in Redis: any change of its bytes is noticed."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from prefix_store.backend import KeptBlock, OutgoingRecord
from prefix_store.base import BlockHash
from prefix_store.record import RecordShape, seal, write_header
from prefix_store.redis_value import (
    FOOTER_BYTES,
    Reference,
    charged_bytes,
    close_value,
    open_value,
    owner_of,
    read_footer,
    reference_of,
)


def outgoing(salt: str = "salt", payload_bytes: int = 100, seed: int = 1) -> OutgoingRecord:
    rng = random.Random(seed)
    shape = RecordShape(4, payload_bytes)
    record = memoryview(bytearray(shape.num_bytes))
    block_hash, parent = BlockHash(rng.randbytes(16)), BlockHash(rng.randbytes(16))
    write_header(record, block_hash, parent, rng.randbytes(16), shape)
    record[shape.payload_at :] = rng.randbytes(payload_bytes)
    seal(record, block_hash, shape)
    block = KeptBlock(
        block_hash, None if salt else parent, 4, charged_bytes(len(record)), salt, b"", len(record)
    )
    return OutgoingRecord(block, record)


def opened(value: bytes | bytearray | memoryview, record: OutgoingRecord) -> KeptBlock | None:
    view, record_bytes = memoryview(value), len(record.data)
    return open_value(view[:record_bytes], view[record_bytes:], record.block.block_hash)


@given(salt=st.text(max_size=30), payload_bytes=st.integers(0, 5000))
@settings(max_examples=40, deadline=None)
def test_what_is_closed_is_opened_as_it_was(salt: str, payload_bytes: int) -> None:
    """The block's description comes from the value alone."""
    record = outgoing(salt, payload_bytes)
    value = close_value(record, owner_of("me"))
    assert value is not None
    assert opened(value, record) == record.block
    assert len(value) == reference_of(record).value_bytes
    footer = read_footer(value[-FOOTER_BYTES:])
    assert footer is not None
    assert footer.owner == owner_of("me") != owner_of("other")


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_any_flipped_bit_is_noticed(data: st.DataObject) -> None:
    """In the record, the salt or the footer; what pads the record's header is covered as well."""
    record = outgoing()
    value = close_value(record, owner_of("me"))
    assert value is not None
    raw = bytearray(value)
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] ^= 1 << data.draw(st.integers(0, 7))
    assert opened(raw, record) is None


@given(keep=st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_a_torn_value_is_noticed(keep: int) -> None:
    """Cut off anywhere."""
    record = outgoing()
    value = close_value(record, owner_of("me"))
    assert value is not None
    torn = memoryview(value)[: min(keep, len(value) - 1)]
    assert opened(torn, record) is None


def test_bytes_that_are_not_of_the_block_are_not_closed() -> None:
    """What would be refused at the read is not written either."""
    one, other = outgoing(seed=1), outgoing(seed=2)
    assert close_value(OutgoingRecord(one.block, other.data), owner_of("me")) is None
    assert close_value(OutgoingRecord(one.block, one.data[:-1]), owner_of("me")) is None


def test_a_reference_survives_packing() -> None:
    """And other bytes are no reference."""
    reference = Reference(32, 100_000, 100_064)
    assert Reference.unpack(reference.pack()) == reference
    assert Reference.unpack(b"x") is None

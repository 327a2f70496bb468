"""Prompts as records, and a Redis backend that is closed by itself: for tests of the Redis tier."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator, Sequence

from prefix_store.backend import KeptBlock, OutgoingRecord
from prefix_store.base import BlockHash
from prefix_store.record import RecordShape, seal, write_header
from prefix_store.redis_backend import RedisBackend
from prefix_store.redis_value import charged_bytes

PATIENT_S = 5.0
"""Time-out of backends that shall not time out, however busy the machine is."""


def chain(length: int, payload_bytes: int = 3000, seed: int = 0) -> list[OutgoingRecord]:
    """The records of a prompt of its own."""
    rng = random.Random(seed)
    shape = RecordShape(4, payload_bytes)
    records: list[OutgoingRecord] = []
    parent = BlockHash(rng.randbytes(16))
    for i in range(length):
        record = memoryview(bytearray(shape.num_bytes))
        block_hash, tokens = BlockHash(rng.randbytes(16)), rng.randbytes(16)
        write_header(record, block_hash, parent, tokens, shape)
        record[shape.payload_at :] = rng.randbytes(payload_bytes)
        seal(record, block_hash, shape)
        block = KeptBlock(
            block_hash, parent if i else None, 4, charged_bytes(len(record)),
            "" if i else "tenant", tokens, len(record),
        )  # fmt: skip
        records.append(OutgoingRecord(block, record))
        parent = block_hash
    return records


def hashes_of(records: Sequence[OutgoingRecord]) -> list[BlockHash]:
    return [record.block.block_hash for record in records]


async def read_back(backend: RedisBackend, records: Sequence[OutgoingRecord]) -> list[bool]:
    """Which records come back; that those are exactly what was written is checked here."""
    buffers = [memoryview(bytearray(len(record.data))) for record in records]
    blocks = await backend.read(hashes_of(records), buffers)
    for record, block, buffer in zip(records, blocks, buffers, strict=True):
        assert block is None or (block == record.block and buffer == record.data)
    return [block is not None for block in blocks]


@contextlib.asynccontextmanager
async def redis_backend(
    url: str, store_id: str = "store", *, timeout_s: float = PATIENT_S, **more: float
) -> AsyncIterator[RedisBackend]:
    """Recovered and ready."""
    backend = RedisBackend(url, store_id, timeout_s=timeout_s, **more)
    try:
        await backend.recover()
        yield backend
    finally:
        await backend.close()

"""What a tier's medium gives without engine and server: bandwidth in slices, latency of a block."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.report import Spread
from prefix_store.backend import Backend, KeptBlock
from prefix_store.base import BlockHash
from prefix_store.disk_backend import DiskBackend
from prefix_store.offers import SLICE_BYTES
from prefix_store.redis_backend import RedisBackend

SINGLE_READS = 50
CAPACITY_BYTES = 1 << 33


@dataclass(frozen=True, slots=True)
class Speed:
    """Of one tier."""

    bandwidth_bytes_s: float
    """In slices of 4 MiB, one after another, checks included."""
    latency_s: float
    """Median of single blocks."""
    record_bytes: int


async def speed_of_disk(directory: Path) -> tuple[Speed, list[KeptBlock]]:
    """With the page cache as it is. No store may use the directory meanwhile."""
    backend = DiskBackend(directory, CAPACITY_BYTES)
    blocks = await backend.recover()
    try:
        return await _speed(backend, blocks), blocks
    finally:
        await backend.close()


async def speed_of_redis(url: str, blocks: Sequence[KeptBlock]) -> Speed:
    """Of blocks that some store has written."""
    backend = RedisBackend(url, "bench", timeout_s=2.0)
    await backend.recover()
    try:
        return await _speed(backend, blocks)
    finally:
        await backend.close()


async def _speed(backend: Backend, blocks: Sequence[KeptBlock]) -> Speed:
    size = blocks[0].record_bytes
    each = max(1, SLICE_BYTES // size)
    into = [memoryview(bytearray(size)) for _ in range(each)]
    began, num_bytes = time.perf_counter(), 0
    for start in range(0, len(blocks), each):
        part = [block.block_hash for block in blocks[start : start + each]]
        num_bytes += size * await _read(backend, part, into[: len(part)])
    bandwidth = num_bytes / (time.perf_counter() - began)
    single = []
    for block in blocks[:SINGLE_READS]:
        began = time.perf_counter()
        await _read(backend, [block.block_hash], into[:1])
        single.append(time.perf_counter() - began)
        await asyncio.sleep(0)
    return Speed(bandwidth, Spread.of(single).median, size)


async def _read(backend: Backend, hashes: list[BlockHash], into: list[memoryview]) -> int:
    found = await backend.read(hashes, into)
    if None in found:
        raise SystemExit("bench: a block is not where it was written")
    return len(found)

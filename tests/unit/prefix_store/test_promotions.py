"""Blocks on their way up into memory."""

from __future__ import annotations

import asyncio

import pytest
from faulty_backend import FaultyBackend
from hypothesis import given
from hypothesis import strategies as st

from policies.access import NO_ACCESS
from policies.admission import ADMIT_ALL, all_of
from policies.base import MIB
from policies.config import MemoryTierConfig
from policies.eviction import LruEviction
from prefix_store import events, load_limit
from prefix_store.hashing import as_token_ids, extend_chain, routing_root
from prefix_store.lower_tier import LowerTier, LowerTierSettings, Offer
from prefix_store.memory_tier import RESERVATION_S, MemoryTier
from prefix_store.promotions import Promotions, Upward
from prefix_store.record import RecordShape, payload, seal, write_header

SHAPE = RecordShape(4, 448)
ROOT = routing_root("m", "s")
TOKENS = as_token_ids(range(16))
HASHES = extend_chain(ROOT, TOKENS, 4)


def record_of(block: int) -> memoryview:
    record = memoryview(bytearray(SHAPE.num_bytes))
    above = HASHES[block - 1] if block else ROOT
    tokens = TOKENS[4 * block : 4 * block + 4].tobytes()
    write_header(record, HASHES[block], above, tokens, SHAPE)
    payload(record, SHAPE)[:16] = HASHES[block]
    seal(record, HASHES[block], SHAPE)
    return record


class Upstairs:
    """Memory for `num_records`, over a tier that has four blocks of one prompt."""

    def __init__(self, num_records: int = 4) -> None:
        self.now = 0.0
        self.view = memoryview(bytearray(num_records * SHAPE.num_bytes))
        self.published: list[events.KVEvent] = []
        self.memory = MemoryTier(
            MemoryTierConfig(capacity=MIB), self.view, 1000.0, self.published.extend
        )
        self.backend = FaultyBackend()
        settings = LowerTierSettings("disk", "storage", MIB, LruEviction(), shared=False)
        self.tier = LowerTier(settings, self.backend, all_of(ADMIT_ALL), self.published.extend)
        self.promotions = Promotions(self.memory, self.view, lambda: self.now)

    async def start(self) -> None:
        await self.tier.start()
        offers = [
            Offer(
                block_hash, HASHES[i - 1] if i else None,
                TOKENS[4 * i : 4 * i + 4].tobytes(), "", record_of(i),
            )
            for i, block_hash in enumerate(HASHES)
        ]  # fmt: skip
        assert await self.tier.keep(offers, NO_ACCESS) == 4

    def begin(self, give_up_s: float | None = None) -> int:
        """Bring everything up; the lease that waits for it, 0 when nothing comes."""
        blocks = [Upward(block_hash, self.tier) for block_hash in HASHES]
        coming = self.promotions.begin(None, blocks, SHAPE.num_bytes, NO_ACCESS, give_up_s)
        if not coming:
            return 0
        lease = self.memory.open_lease((), self.now)
        self.promotions.wait_for(lease, HASHES[: len(coming)])
        return lease

    async def settle(self, lease: int) -> int:
        """How many blocks have arrived when no more come."""
        for _ in range(1000):
            progress = self.promotions.progress(lease)
            if progress.done:
                return progress.arrived
            await asyncio.sleep(0)
        raise AssertionError("the load never ended")


async def test_a_slow_read_never_writes_into_a_place_that_is_somebody_elses() -> None:
    """The tier answers after any reservation of an engine would have expired."""
    up = Upstairs()
    await up.start()
    up.backend.gate = asyncio.Event()
    lease = up.begin()
    await asyncio.sleep(0)
    up.now = 2 * RESERVATION_S
    up.memory.expire(up.now)
    other = extend_chain(ROOT, as_token_ids([90, 91, 92, 93]), 4)
    (place,) = up.memory.reserve(None, other, SHAPE.num_bytes, up.now)
    assert place is None  # all of memory is waiting for the read
    up.backend.gate.set()
    assert await up.settle(lease) == 4
    assert up.memory.reserved_bytes == 0
    await up.promotions.close()


async def test_nothing_is_begun_once_transfers_are_given_up() -> None:
    """The arena is closed next."""
    up = Upstairs()
    await up.start()
    up.backend.gate = asyncio.Event()
    lease = up.begin()
    await asyncio.sleep(0)
    await up.promotions.close()
    assert up.promotions.progress(lease).done
    assert up.memory.reserved_bytes == 0
    assert up.begin() == 0
    assert up.memory.reserved_bytes == 0


async def test_a_load_that_is_given_up_leaves_no_reservation() -> None:
    """What has not come by then is computed."""
    up = Upstairs()
    await up.start()
    up.backend.gate = asyncio.Event()
    lease = up.begin(give_up_s=0.0)
    assert await up.settle(lease) == 0
    assert up.memory.reserved_bytes == 0
    up.memory.release(lease)
    assert up.memory.free_bytes == up.memory.capacity_bytes


async def test_a_load_of_which_nothing_comes_does_not_get_all_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The request would wait for nothing, and compute everything afterwards."""
    monkeypatch.setattr(load_limit, "PATIENCE", 0.0)
    up = Upstairs()
    await up.start()
    up.backend.gate = asyncio.Event()
    assert await up.settle(up.begin(give_up_s=3600.0)) == 0
    assert up.memory.reserved_bytes == 0


@given(part=st.floats(0.0, 1.0))
def test_a_load_that_is_on_time_is_never_given_up(part: float) -> None:
    """After any part of its time, when so much has come; not at half the pace either."""
    assert load_limit.allowed(part) >= part
    assert load_limit.allowed(part / 2) >= part
    assert load_limit.PATIENCE <= load_limit.allowed(part) <= 1.0


async def test_a_block_that_is_lost_below_ends_the_run() -> None:
    """The blocks before it are there."""
    up = Upstairs()
    await up.start()
    up.backend.records.pop(HASHES[2])
    assert await up.settle(up.begin()) == 2
    assert up.memory.reserved_bytes == 0


async def test_blocks_can_be_used_before_the_last_one_has_arrived() -> None:
    """What has come by the time that a load is given up stays."""
    up = Upstairs()
    await up.start()
    up.backend.gate = asyncio.Event()
    up.backend.gate.set()
    lease = up.begin(give_up_s=5.0)
    while not (arrived := up.promotions.progress(lease)).arrived:
        await asyncio.sleep(0)
        if up.backend.num_reads:
            up.backend.gate.clear()
    assert (arrived.arrived, arrived.done) == (2, False)
    assert up.memory.match(HASHES, 0, up.now).num_blocks == 2
    await up.promotions.close()
    assert up.promotions.progress(lease).arrived == 2
    assert up.memory.reserved_bytes == 0

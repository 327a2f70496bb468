"""A tier below memory whose medium fails, or is used by several at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
from faulty_backend import EXTRA_BYTES, FaultyBackend

from policies.access import Access
from policies.admission import ADMIT_ALL, all_of
from policies.eviction import LruEviction
from prefix_store import events, lower_tier
from prefix_store.base import BlockHash
from prefix_store.hashing import as_token_ids, extend_chain, routing_root
from prefix_store.lower_tier import LowerTier, LowerTierSettings, Offer

ROOT = routing_root("m", "s")
RECORD_BYTES = 100
KEPT_BYTES = RECORD_BYTES + EXTRA_BYTES


class Chain:
    """A prompt's blocks; what is written of each follows from its hash."""

    def __init__(self, seed: int, num_blocks: int) -> None:
        self.tokens = as_token_ids([seed * 100 + i for i in range(num_blocks)])
        self.hashes = extend_chain(ROOT, self.tokens, 1)

    def data(self, block: int) -> memoryview:
        return memoryview((self.hashes[block] * 7)[:RECORD_BYTES])

    def offers(self, num_blocks: int | None = None) -> list[Offer]:
        count = len(self.hashes) if num_blocks is None else num_blocks
        return [
            Offer(
                self.hashes[i], self.hashes[i - 1] if i else None,
                self.tokens[i : i + 1].tobytes(), "", self.data(i),
            )
            for i in range(count)
        ]  # fmt: skip


class Below:
    """A tier with room for `num_blocks`."""

    def __init__(
        self, num_blocks: int, *, shared: bool = False, below: LowerTier | None = None
    ) -> None:
        self.backend = FaultyBackend()
        self.published: list[events.KVEvent] = []
        settings = LowerTierSettings(
            "redis" if shared else "disk", "m", num_blocks * KEPT_BYTES, LruEviction(), shared
        )
        self.tier = LowerTier(
            settings, self.backend, all_of(ADMIT_ALL), self.published.extend, below=below
        )

    async def read(self, hashes: Sequence[BlockHash]) -> int:
        buffers = [memoryview(bytearray(RECORD_BYTES)) for _ in hashes]
        return sum(block is not None for block in await self.tier.read(hashes, buffers))

    def has(self, chain: Chain) -> int:
        return self.tier.match(chain.hashes, Access())

    def check(self) -> None:
        """The account is that of the catalogue and of what lies there."""
        visible = self.tier.visible()
        assert self.tier.used_bytes == sum(node.value.num_bytes for node in visible)
        assert self.tier.used_bytes == self.backend.used_bytes
        assert self.tier.reserved_bytes == 0


async def test_a_parent_that_is_dropped_during_a_write_takes_the_children_along() -> None:
    """Nothing is left in the medium that the catalogue does not know."""
    below = Below(8)
    chain = Chain(1, 4)
    await below.tier.start()
    assert await below.tier.keep(chain.offers(2), Access()) == 2
    dropping: list[asyncio.Task[None]] = []

    def pause(call: str) -> None:
        if call == "write":
            below.backend.pause = None
            dropping.append(asyncio.ensure_future(below.tier.drop(chain.hashes[0])))

    below.backend.pause = pause
    await below.tier.keep(chain.offers(), Access())
    await asyncio.gather(*dropping)
    assert below.has(chain) == 0
    below.check()


async def test_an_outage_costs_a_shared_tier_none_of_its_blocks() -> None:
    """Reads that fail say nothing of what is there, nor does a full tier make room for nothing."""
    below = Below(4, shared=True)
    chain, other = Chain(1, 4), Chain(2, 4)
    await below.tier.start()
    await below.tier.keep(chain.offers(), Access())
    below.backend.faults_to_come.fail_reads = 4
    assert await below.read(chain.hashes) == 0
    assert below.has(chain) == 4
    below.backend.faults_to_come.is_down = True
    assert await below.read(chain.hashes) == 0
    assert await below.tier.keep(other.offers(), Access()) == 0
    await below.tier.probe()
    below.backend.faults_to_come.is_down = False
    assert below.has(chain) == 4
    assert await below.read(chain.hashes) == 4
    below.check()


@pytest.mark.parametrize("probe_bytes", [1, 2 * RECORD_BYTES, 100 * RECORD_BYTES])
async def test_a_probe_reads_the_end_of_a_run(
    monkeypatch: pytest.MonkeyPatch, probe_bytes: int
) -> None:
    """One block alone would make a tier look as slow as its first block is."""
    monkeypatch.setattr(lower_tier, "PROBE_BYTES", probe_bytes)
    below = Below(5)
    chain = Chain(1, 4)
    await below.tier.start()
    await below.tier.keep(chain.offers(), Access())
    below.tier.reads.observe(10**12, 1.0)
    await below.tier.probe()
    wanted = min(len(chain.hashes), -(-probe_bytes // RECORD_BYTES))
    assert below.tier.counters.bytes_read == wanted * RECORD_BYTES
    assert below.tier.load_s(1) is not None
    below.check()


async def test_a_probe_of_a_slow_tier_reads_little() -> None:
    """Whoever looks something up waits behind it."""
    below = Below(5)
    await below.tier.start()
    await below.tier.keep(Chain(1, 4).offers(), Access())
    below.tier.reads.observe(RECORD_BYTES, lower_tier.PROBE_S)  # a block in the time of a probe
    await below.tier.probe()
    assert below.tier.counters.bytes_read == RECORD_BYTES


async def test_a_probe_of_an_empty_tier_does_nothing() -> None:
    below = Below(5)
    await below.tier.start()
    await below.tier.probe()
    assert below.tier.counters.bytes_read == 0


async def test_what_a_shared_tier_has_lost_leaves_the_catalogue() -> None:
    """It answered, and the block was not there."""
    below = Below(4, shared=True)
    chain = Chain(1, 4)
    await below.tier.start()
    await below.tier.keep(chain.offers(), Access())
    del below.backend.records[chain.hashes[2]]
    assert await below.read(chain.hashes) == 3
    assert below.has(chain) == 2
    below.check()


async def test_room_of_a_block_counts_until_it_is_removed() -> None:
    """Others write while a dropped block is still there: the quota holds."""
    below = Below(2)
    chain, other = Chain(1, 2), Chain(2, 2)
    await below.tier.start()
    await below.tier.keep(chain.offers(), Access())
    below.backend.delays = (9, 0)  # the removal is slow, the write is not
    dropping = asyncio.ensure_future(below.tier.drop(chain.hashes[0]))
    await asyncio.sleep(0)
    await asyncio.gather(below.tier.keep(other.offers(), Access()), dropping)
    assert below.backend.peak_bytes <= 2 * KEPT_BYTES
    below.check()


async def test_a_read_that_was_given_up_is_known_to_be_slow() -> None:
    """Otherwise each request would try it again."""
    below = Below(4)
    chain = Chain(1, 4)
    await below.tier.start()
    await below.tier.keep(chain.offers(), Access())
    below.backend.gate = asyncio.Event()
    before = below.tier.load_s(4 * RECORD_BYTES)
    assert before is not None
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await below.read(chain.hashes)
    after = below.tier.load_s(4 * RECORD_BYTES)
    assert after is not None
    assert after > before
    assert after > 0.01


async def test_a_read_that_was_given_up_is_judged_by_what_had_arrived() -> None:
    """Not by what was still to come: the tier would look faster than it is."""
    below = Below(20)
    chain = Chain(1, 16)
    await below.tier.start()
    await below.tier.keep(chain.offers(), Access())
    gate = below.backend.gate = asyncio.Event()
    gate.set()
    buffers = [memoryview(bytearray(RECORD_BYTES)) for _ in range(16)]
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await below.tier.read(chain.hashes, buffers, lambda blocks: gate.clear())
    assert below.tier.counters.bytes_read == 2 * RECORD_BYTES
    needed_s = below.tier.load_s(3 * RECORD_BYTES)
    assert needed_s is not None
    assert needed_s > 0.04


async def test_a_victim_goes_down_with_the_ancestors_that_are_missing_there() -> None:
    """Read in slices, and whole at the other end."""
    redis = Below(20, shared=True)
    disk = Below(4, below=redis.tier)
    chain, other = Chain(1, 4), Chain(2, 4)
    await redis.tier.start()
    await disk.tier.start()
    await disk.tier.keep(chain.offers(), Access())
    await disk.tier.keep(other.offers(), Access())
    assert redis.has(chain) == 4
    buffers = [memoryview(bytearray(RECORD_BYTES)) for _ in range(4)]
    blocks = await redis.tier.read(chain.hashes, buffers)
    assert buffers == [chain.data(i) for i in range(4)]
    assert [block.num_tokens for block in blocks if block is not None] == [1] * 4
    disk.check()
    redis.check()


async def test_nothing_is_read_for_a_tier_that_is_down() -> None:
    """The victim just goes."""
    redis = Below(20, shared=True)
    disk = Below(4, below=redis.tier)
    await redis.tier.start()
    await disk.tier.start()
    await disk.tier.keep(Chain(1, 4).offers(), Access())
    redis.backend.faults_to_come.is_down = True
    await disk.tier.keep(Chain(2, 4).offers(), Access())
    assert disk.backend.num_reads == 0
    assert len(disk.tier) == 4
    disk.check()


async def test_a_tier_that_comes_late_announces_what_it_has() -> None:
    """Who follows the events has seen the store without it."""
    below = Below(4)
    chain = Chain(1, 3)
    await below.tier.start()
    await below.tier.keep(chain.offers(), Access())
    again = Below(4)
    again.backend.records = below.backend.records
    again.backend.faults_to_come.is_down = True
    await again.tier.start()
    assert not again.tier.ready
    again.backend.faults_to_come.is_down = False
    await again.tier.start()
    (event,) = again.published
    assert isinstance(event, events.BlockStored)
    assert event.block_hashes == chain.hashes


async def test_a_smaller_quota_takes_effect_at_once() -> None:
    """Tails go first."""
    below = Below(4)
    chain = Chain(1, 4)
    await below.tier.start()
    await below.tier.keep(chain.offers(), Access())
    settings = replace(below.tier.settings, capacity_bytes=2 * KEPT_BYTES)
    await below.tier.apply(settings, below.tier.gate)
    assert below.has(chain) == 2
    below.check()

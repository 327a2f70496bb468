"""The tiers as one, with a shared tier whose medium fails or answers late."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from faulty_backend import FaultyBackend

from policies.access import Access
from policies.admission import ADMIT_ALL, all_of
from policies.base import MIB
from policies.config import MemoryTierConfig
from policies.eviction import LruEviction
from policies.loading import AlwaysLoading
from prefix_store import events, protocol
from prefix_store.base import BlockHash
from prefix_store.hashing import as_token_ids, extend_chain, routing_root
from prefix_store.hierarchy import Hierarchy
from prefix_store.lower_tier import LowerTier, LowerTierSettings, Offer
from prefix_store.memory_tier import MemoryTier
from prefix_store.record import RecordShape, payload, seal, write_header

SHAPE = RecordShape(1, 128)
ROOT = routing_root("m", "s")


class Blocks:
    """A prompt of so many blocks of one token, and their records."""

    def __init__(self, seed: int, num_blocks: int) -> None:
        self.tokens = as_token_ids([seed * 100 + i for i in range(num_blocks)])
        self.hashes = extend_chain(ROOT, self.tokens, 1)

    def record(self, block: int) -> memoryview:
        record = memoryview(bytearray(SHAPE.num_bytes))
        above = self.hashes[block - 1] if block else ROOT
        tokens = self.tokens[block : block + 1].tobytes()
        write_header(record, self.hashes[block], above, tokens, SHAPE)
        payload(record, SHAPE)[:16] = self.hashes[block]
        seal(record, self.hashes[block], SHAPE)
        return record

    def offers(self) -> list[Offer]:
        return [
            Offer(
                self.hashes[i], self.hashes[i - 1] if i else None,
                self.tokens[i : i + 1].tobytes(), "", self.record(i),
            )
            for i in range(len(self.hashes))
        ]  # fmt: skip


class Stack:
    """Memory over a shared tier."""

    def __init__(self) -> None:
        self.now = 0.0
        self.view = memoryview(bytearray(16 * SHAPE.num_bytes))
        self.published: list[events.KVEvent] = []
        self.memory = MemoryTier(
            MemoryTierConfig(capacity=MIB), self.view, 30.0, self.published.extend
        )
        self.backend = FaultyBackend()
        settings = LowerTierSettings("redis", "redis", MIB, LruEviction(), shared=True)
        self.tier = LowerTier(settings, self.backend, all_of(ADMIT_ALL), self.published.extend)
        self.tiers = Hierarchy(
            self.memory, self.view, [self.tier], loading=AlwaysLoading(), clock=lambda: self.now
        )

    def match(self, hashes: Sequence[BlockHash], request: str = "r") -> protocol.Matched:
        joined = protocol.join_hashes(list(hashes))
        return self.tiers.match(protocol.Match(joined, 0, request, SHAPE.num_bytes, 1), "engine")

    async def answered(self, hashes: Sequence[BlockHash], request: str = "r") -> protocol.Matched:
        for _ in range(100):
            matched = self.match(hashes, request)
            if not matched.pending:
                return matched
            await asyncio.sleep(0)
        raise AssertionError("the store never answered")

    async def arrived(self, lease: int) -> int:
        for _ in range(1000):
            progress = self.tiers.progress(lease)
            if progress.done:
                return progress.arrived
            await asyncio.sleep(0)
        raise AssertionError("the load never ended")


async def test_a_shared_tier_that_is_away_costs_a_request_nothing() -> None:
    """Not even the question: it would be one more step of the engine."""
    stack = Stack()
    blocks = Blocks(1, 4)
    await stack.tier.start()
    await stack.tier.keep(blocks.offers(), Access())
    stack.backend.faults_to_come.is_down = True
    matched = stack.match(blocks.hashes)
    assert not matched.pending
    assert matched.num_blocks == 0
    assert stack.memory.reserved_bytes == 0
    assert stack.backend.num_reads == 0


async def test_a_request_that_waits_for_an_answer_is_one_use() -> None:
    """Engines ask at every step; policies must not take that for new requests."""
    stack = Stack()
    blocks = Blocks(1, 4)
    await stack.tier.start()
    for _ in range(50):
        assert stack.match(blocks.hashes).pending
    assert stack.memory.counters.matches == 1
    await stack.answered(blocks.hashes)
    assert stack.memory.counters.matches == 2


async def test_prompts_under_one_name_get_an_answer_each() -> None:
    """A batch of prompts is one request of the gateway."""
    stack, neighbour = Stack(), Stack()
    there, missing = Blocks(1, 4), Blocks(2, 4)
    await stack.tier.start()
    await neighbour.tier.start()
    await neighbour.tier.keep(there.offers(), Access())
    stack.backend.records = neighbour.backend.records
    assert stack.match(there.hashes).pending
    assert stack.match(missing.hashes).pending
    await asyncio.sleep(0.01)
    assert stack.match(missing.hashes).num_blocks == 0
    matched = stack.match(there.hashes)
    assert matched.from_redis == 4
    assert await stack.arrived(matched.lease) == 4
    stack.tiers.release(matched.lease)
    assert stack.memory.num_leased_blocks == 0


async def test_an_answer_that_nobody_fetches_is_forgotten() -> None:
    """The client is gone."""
    stack = Stack()
    blocks = Blocks(1, 4)
    await stack.tier.start()
    assert stack.match(blocks.hashes).pending
    await asyncio.sleep(0.01)
    stack.now = 5.0
    stack.tiers.expire()
    assert stack.match(blocks.hashes).pending
    assert stack.memory.num_leases == 0


async def test_a_client_that_leaves_during_a_load_leaves_nothing_behind() -> None:
    """The blocks come all the same: others may want them."""
    stack = Stack()
    blocks = Blocks(1, 4)
    await stack.tier.start()
    await stack.tier.keep(blocks.offers(), Access())
    matched = await stack.answered(blocks.hashes)
    assert matched.arriving == 4
    assert await stack.arrived(matched.lease) == 4
    stack.now = 100.0
    stack.tiers.expire()
    assert stack.memory.num_leases == 0
    assert stack.memory.num_leased_blocks == 0
    assert stack.memory.reserved_bytes == 0
    assert stack.tiers.progress(matched.lease) == protocol.Progressed(0, True)
    assert len(stack.memory) == 4

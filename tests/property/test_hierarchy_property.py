"""Memory, disk and a shared tier under random requests with faults: what an engine reads under a
lease is what was saved, nothing stays held once everybody let go, and every account is exact."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

from faulty_backend import EXTRA_BYTES, FaultyBackend
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from policies.admission import ADMIT_ALL, all_of
from policies.base import MIB
from policies.config import MemoryTierConfig
from policies.eviction import LruEviction
from policies.loading import AlwaysLoading
from prefix_store import events, protocol
from prefix_store.base import BlockHash
from prefix_store.hashing import as_token_ids, extend_chain, routing_root
from prefix_store.hierarchy import Hierarchy
from prefix_store.lower_tier import LowerTier, LowerTierSettings
from prefix_store.memory_tier import MemoryTier
from prefix_store.record import RecordShape, payload, seal, write_header

ROOT = routing_root("m", "s")
SHAPE = RecordShape(1, 64)
KEPT_BYTES = SHAPE.num_bytes + EXTRA_BYTES
LEASE_S = 30.0
MEMORY_BLOCKS = 9

PROMPTS = st.builds(
    lambda prompt, length: prompt[:length],
    st.sampled_from([[0, 0, 0, 0, 0, 0], [0, 0, 0, 1, 1, 1], [1, 1, 1, 1]]),
    st.integers(3, 6),
)
"""Few different blocks, so that prompts extend and fork one another, and come again."""


DELAYS = st.lists(st.integers(0, 9), min_size=1, max_size=4)


def hashes_of(prompt: list[int]) -> list[BlockHash]:
    return extend_chain(ROOT, as_token_ids(prompt), 1)


def record_of(prompt: list[int], block: int) -> bytes:
    hashes = hashes_of(prompt)
    record = memoryview(bytearray(SHAPE.num_bytes))
    tokens = as_token_ids(prompt[block : block + 1]).tobytes()
    write_header(record, hashes[block], hashes[block - 1] if block else ROOT, tokens, SHAPE)
    payload(record, SHAPE)[:] = hashes[block] * 4
    seal(record, hashes[block], SHAPE)
    return bytes(record)


@dataclass
class Load:
    """What an engine was promised under one lease."""

    prompt: list[int]
    first: int
    """Of the leased blocks, in the prompt."""
    offsets: list[int]
    num_there: int
    num_at_first: int


class HierarchyMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.requests = 0
        self.loads: dict[int, Load] = {}
        self.unwritten: list[int] = []
        self.loop = asyncio.new_event_loop()
        self.backends = [FaultyBackend(), FaultyBackend()]
        self.running: asyncio.Task[None] | None = None
        self.start()

    def start(self) -> None:
        redis = self.new_tier(1, 16, None)
        self.lower = [self.new_tier(0, 12, redis), redis]
        for tier in self.lower:
            self.loop.run_until_complete(tier.start())
        self.view = memoryview(bytearray(MEMORY_BLOCKS * SHAPE.num_bytes))
        config = MemoryTierConfig(capacity=MIB, eviction=LruEviction())
        self.memory = MemoryTier(config, self.view, LEASE_S, self.ignore)
        self.tiers = Hierarchy(
            self.memory, self.view, self.lower, loading=AlwaysLoading(),
            on_save=[redis], clock=lambda: self.now,
        )  # fmt: skip
        self.running = self.loop.create_task(self.tiers.run())

    def new_tier(self, level: int, num_blocks: int, below: LowerTier | None) -> LowerTier:
        name = ("disk", "redis")[level]
        tier_settings = LowerTierSettings(
            name, name, num_blocks * KEPT_BYTES, LruEviction(), shared=level == 1
        )
        return LowerTier(
            tier_settings, self.backends[level], all_of(ADMIT_ALL), self.ignore, below=below
        )

    def ignore(self, changes: list[events.KVEvent]) -> None:
        del changes

    def stop(self) -> None:
        assert self.running is not None
        self.running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            self.loop.run_until_complete(self.running)
        assert self.memory.reserved_bytes == len(self.unwritten) * self.record_room()
        self.loads.clear()
        self.unwritten.clear()

    def record_room(self) -> int:
        return -(-SHAPE.num_bytes // 64) * 64

    def turn(self, count: int) -> None:
        """Others get on."""

        async def turns() -> None:
            for _ in range(count):
                await asyncio.sleep(0)

        self.loop.run_until_complete(turns())

    def ask(self, asked: protocol.Match) -> protocol.Matched:
        async def inside() -> protocol.Matched:
            return self.tiers.match(asked, "engine")

        return self.loop.run_until_complete(inside())

    @rule(prompt=PROMPTS, commits=st.sampled_from([True, True, True, False]))
    def save(self, prompt: list[int], commits: bool) -> None:
        asked = protocol.Reserve(
            ROOT, True, protocol.join_hashes(hashes_of(prompt)), SHAPE.num_bytes
        )
        tickets = []
        for i, place in enumerate(self.tiers.reserve(asked, 1)):
            if place is not None:
                offset = place.extent.offset
                self.view[offset : offset + SHAPE.num_bytes] = record_of(prompt, i)
                tickets.append(place.ticket)
        if commits:
            self.tiers.commit(protocol.Commit(tickets))
        else:
            self.unwritten += tickets

    @rule(prompt=PROMPTS)
    def save_and_forget(self, prompt: list[int]) -> None:
        """It lies below memory only, unless somebody reads it or it did not get down."""
        self.save(prompt, True)
        self.turn(80)
        self.memory.clear()

    @rule(prompt=PROMPTS, turns=st.integers(0, 30), delays=DELAYS)
    def load_from_below(self, prompt: list[int], turns: int, delays: list[int]) -> None:
        self.save_and_forget(prompt)
        self.others_get_on(1, delays)
        self.match(prompt, 0, 60)
        if self.loads:
            self.ask_for_progress(len(self.loads) - 1, turns)

    @rule(prompt=PROMPTS, patience=st.sampled_from([0, 60]))
    def extend(self, prompt: list[int], patience: int) -> None:
        """The head lies in memory, the rest anywhere."""
        self.save(prompt[:2], True)
        self.match(prompt, 0, patience)

    @rule(prompt=PROMPTS, other=PROMPTS, delays=DELAYS)
    def load_slowly(self, prompt: list[int], other: list[int], delays: list[int]) -> None:
        """Everybody's time is over before the blocks come."""
        self.save_and_forget(prompt)
        self.match(prompt, 0, 60)
        self.wait(100.0)
        self.save(other, True)
        self.others_get_on(60, delays)
        self.match(other, 0, 60)

    @precondition(lambda self: self.unwritten)
    @rule()
    def cancel(self) -> None:
        self.memory.cancel([self.unwritten.pop()])

    @rule(
        prompt=PROMPTS, lease_from=st.sampled_from([0, 0, 0, 2]), patience=st.sampled_from([0, 60])
    )
    def match(self, prompt: list[int], lease_from: int, patience: int) -> None:
        self.requests += 1
        asked = protocol.Match(
            protocol.join_hashes(hashes_of(prompt)), lease_from, f"r{self.requests}",
            SHAPE.num_bytes, 1,
        )  # fmt: skip
        matched = self.ask(asked)
        while matched.pending and patience:
            self.turn(1)
            patience -= 1
            matched = self.ask(asked)
        if matched.pending:
            assert (matched.lease, matched.offsets) == (0, [])
        if not matched.lease:
            return
        assert matched.num_blocks <= len(prompt)
        assert len(matched.offsets) == matched.num_blocks - lease_from
        there = len(matched.offsets) - matched.arriving
        self.loads[matched.lease] = Load(prompt, lease_from, matched.offsets, there, there)

    @precondition(lambda self: self.loads)
    @rule(which=st.integers(0, 9), turns=st.integers(0, 40))
    def ask_for_progress(self, which: int, turns: int) -> None:
        self.turn(turns)
        lease = list(self.loads)[which % len(self.loads)]
        load = self.loads[lease]
        arrived = self.tiers.progress(lease).arrived
        assert load.num_there <= load.num_at_first + arrived <= len(load.offsets)
        load.num_there = load.num_at_first + arrived

    @precondition(lambda self: self.loads)
    @rule(which=st.integers(0, 9))
    def release(self, which: int) -> None:
        lease = list(self.loads)[which % len(self.loads)]
        del self.loads[lease]
        self.tiers.release(lease)

    @rule(prompt=PROMPTS)
    def drop(self, prompt: list[int]) -> None:
        self.loop.run_until_complete(self.tiers.drop(hashes_of(prompt)[-1]))

    @rule()
    def clear(self) -> None:
        self.loop.run_until_complete(self.tiers.clear())

    @rule(turns=st.integers(1, 60), delays=DELAYS)
    def others_get_on(self, turns: int, delays: list[int]) -> None:
        for backend in self.backends:
            backend.delays = delays
        self.turn(turns)

    @rule(seconds=st.sampled_from([1.0, 1.0, 1.0, 100.0]))
    def wait(self, seconds: float) -> None:
        """Clients that said nothing for a hundred seconds have lost their leases and places."""
        self.now += seconds
        if seconds > LEASE_S:
            self.loads.clear()
            self.unwritten.clear()
        self.tiers.expire()
        assert seconds <= LEASE_S or self.memory.num_leases == 0

    @rule(level=st.integers(0, 1), kind=st.sampled_from(["refuse_writes", "lose_reads"]))
    def fault(self, level: int, kind: str) -> None:
        setattr(self.backends[level].faults_to_come, kind, 1)

    @rule()
    def redis_goes_or_comes(self) -> None:
        coming = self.backends[1].faults_to_come
        coming.is_down = not coming.is_down

    @rule()
    def restart(self) -> None:
        self.stop()
        self.backends[1].faults_to_come.is_down = False
        self.start()

    @invariant()
    def leased_bytes_are_what_was_saved(self) -> None:
        for load in self.loads.values():
            for i, offset in enumerate(load.offsets[: load.num_there], load.first):
                record = self.view[offset : offset + SHAPE.num_bytes]
                assert record == record_of(load.prompt, i)

    @invariant()
    def accounts_are_exact(self) -> None:
        memory = self.memory
        assert memory.free_bytes + memory.used_bytes + memory.reserved_bytes == len(self.view)
        assert min(memory.free_bytes, memory.used_bytes, memory.reserved_bytes) >= 0
        for tier, backend in zip(self.lower, self.backends, strict=True):
            assert min(tier.free_bytes, tier.used_bytes, tier.reserved_bytes) >= 0
            assert backend.used_bytes <= tier.settings.capacity_bytes

    def teardown(self) -> None:
        memory = self.memory
        for lease in self.loads:
            self.tiers.release(lease)
        memory.cancel(self.unwritten)
        self.loads.clear()
        self.unwritten.clear()
        self.turn(600)
        assert (memory.num_leases, memory.num_leased_blocks, memory.reserved_bytes) == (0, 0, 0)
        visible = memory.visible()
        assert all(node.leases == 0 for node in visible)
        assert memory.used_bytes == len(visible) * self.record_room()
        for tier in self.lower:
            assert tier.reserved_bytes == 0
            assert tier.used_bytes == len(tier) * KEPT_BYTES
        assert memory.clear() == len(visible)  # everything is a candidate again
        self.stop()
        self.loop.close()


TestHierarchy = HierarchyMachine.TestCase
TestHierarchy.settings = settings(max_examples=80, stateful_step_count=30)

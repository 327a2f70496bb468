"""A disk tier over a shared one, with faults and several users at the same time: the account is
exact, quotas hold at every moment, prefixes stay closed, what is read is what was kept."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from faulty_backend import EXTRA_BYTES, FaultyBackend
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from policies.access import Access
from policies.admission import ADMIT_ALL, all_of
from policies.eviction import LruEviction
from prefix_store import events
from prefix_store.base import BlockHash
from prefix_store.hashing import as_token_ids, extend_chain, routing_root
from prefix_store.lower_tier import LowerTier, LowerTierSettings, Offer

ROOT = routing_root("m", "s")
SIZES = (48, 96)
"""Of records below prompts that begin with 0, and with 1."""

PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=7)
"""Few different blocks, so that prompts extend and fork one another."""


@dataclass(frozen=True)
class Step:
    """One thing that somebody does with a tier."""

    what: str
    prompt: list[int]
    level: int


STEPS = st.builds(
    Step,
    st.sampled_from(["keep", "keep", "keep", "read", "read", "drop", "clear"]),
    PROMPTS,
    st.integers(0, 1),
)


def hashes_of(prompt: list[int]) -> list[BlockHash]:
    return extend_chain(ROOT, as_token_ids(prompt), 1)


def content_of(prompt: list[int], block_hash: BlockHash) -> bytes:
    return (block_hash * 6)[: SIZES[prompt[0]]]


def offers_of(prompt: list[int]) -> list[Offer]:
    hashes = hashes_of(prompt)
    parents = [None, *hashes]
    return [
        Offer(
            block_hash, parents[i], as_token_ids(prompt[i : i + 1]).tobytes(), "",
            memoryview(content_of(prompt, block_hash)),
        )
        for i, block_hash in enumerate(hashes)
    ]  # fmt: skip


class Level:
    """One tier and what its events say."""

    def __init__(self, capacity: int, shared: bool, below: LowerTier | None) -> None:
        self.below = below
        self.backend = FaultyBackend(pause=lambda _: self.check())
        self.settings = LowerTierSettings(
            "redis" if shared else "disk", "m", capacity, LruEviction(), shared
        )
        self.reading: Counter[bytes] = Counter()
        self.may_vanish = False
        self.announced: dict[bytes, bytes | None] = {}
        self.tier = self.new_tier()

    def new_tier(self) -> LowerTier:
        self.announced.clear()
        return LowerTier(
            self.settings, self.backend, all_of(ADMIT_ALL), self.follow, below=self.below
        )

    def follow(self, changes: list[events.KVEvent]) -> None:
        for change in changes:
            if isinstance(change, events.BlockStored):
                parent = change.parent_block_hash
                for block in change.block_hashes:
                    assert isinstance(block, bytes)
                    assert parent is None or parent in self.announced
                    assert block not in self.announced
                    self.announced[block] = parent if isinstance(parent, bytes) else None
                    parent = block
            elif isinstance(change, events.BlockRemoved):
                for block in change.block_hashes:
                    assert isinstance(block, bytes)
                    del self.announced[block]
                    assert block not in self.announced.values()
                    assert self.may_vanish or not self.reading[block]

    def check(self) -> None:
        """At every moment."""
        tier = self.tier
        assert self.backend.used_bytes <= tier.settings.capacity_bytes
        assert tier.free_bytes + tier.used_bytes + tier.reserved_bytes == (
            tier.settings.capacity_bytes
        )
        assert min(tier.free_bytes, tier.used_bytes, tier.reserved_bytes) >= 0

    def check_at_rest(self) -> None:
        self.check()
        tier = self.tier
        visible = tier.visible()
        assert tier.reserved_bytes == 0
        assert tier.used_bytes == sum(node.value.num_bytes for node in visible)
        # While a shared medium fails, what it has lost is not told from what it did not answer.
        shared = tier.settings.shared
        lost = {node.hash for node in visible} - set(self.backend.records)
        assert set(self.backend.records) <= {node.hash for node in visible}
        assert shared or not lost
        assert {node.hash for node in visible} == set(self.announced)
        assert all(node.leases == 0 for node in visible)
        assert all(node.parent is None or node.parent.hash in tier for node in visible)
        assert lost or tier.used_bytes == self.backend.used_bytes


class ChainMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        small = SIZES[0] + EXTRA_BYTES
        redis = Level(9 * small, True, None)
        disk = Level(6 * small, False, redis.tier)
        self.levels = [disk, redis]
        self.loop.run_until_complete(disk.tier.start())
        self.loop.run_until_complete(redis.tier.start())

    def teardown(self) -> None:
        self.loop.close()

    async def take(self, step: Step) -> None:
        level, hashes = self.levels[step.level], hashes_of(step.prompt)
        if step.what == "keep":
            count = await level.tier.keep(offers_of(step.prompt), Access())
            assert count <= len(hashes)
        elif step.what == "drop":
            await level.tier.drop(hashes[-1])
        elif step.what == "clear":
            await level.tier.clear()
        else:
            await self.read(level, step.prompt)

    async def read(self, level: Level, prompt: list[int]) -> None:
        hashes = hashes_of(prompt)
        known = hashes[: level.tier.match(hashes, Access())]
        level.reading.update(known)
        buffers = [memoryview(bytearray(SIZES[prompt[0]])) for _ in known]
        blocks = await level.tier.read(known, buffers)
        level.reading.subtract(known)
        for block_hash, block, buffer in zip(known, blocks, buffers, strict=True):
            if block is not None:
                assert block.block_hash == block_hash
                assert buffer == content_of(prompt, block_hash)

    def go(self, steps: Sequence[Step]) -> None:
        for level in self.levels:
            coming = level.backend.faults_to_come
            level.may_vanish = bool(coming.lose_reads or coming.fail_reads)
            level.may_vanish |= any(step.what == "drop" for step in steps)
            level.may_vanish |= any(
                node.hash not in level.backend.records for node in level.tier.visible()
            )

        async def all_at_once() -> None:
            await asyncio.wait_for(asyncio.gather(*map(self.take, steps)), 5)

        self.loop.run_until_complete(all_at_once())

    @rule(step=STEPS)
    def alone(self, step: Step) -> None:
        self.go([step])

    @rule(
        steps=st.lists(STEPS, min_size=2, max_size=4),
        delays=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    )
    def together(self, steps: list[Step], delays: list[int]) -> None:
        for level in self.levels:
            level.backend.delays = delays
        self.go(steps)

    @rule(level=st.integers(0, 1), count=st.integers(1, 4))
    def refuse_writes(self, level: int, count: int) -> None:
        self.levels[level].backend.faults_to_come.refuse_writes = count

    @rule(level=st.integers(0, 1), count=st.integers(1, 2))
    def lose_reads(self, level: int, count: int) -> None:
        self.levels[level].backend.faults_to_come.lose_reads = count

    @rule(level=st.integers(0, 1))
    def fail_a_read(self, level: int) -> None:
        self.levels[level].backend.faults_to_come.fail_reads = 1

    @rule()
    def redis_goes_or_comes(self) -> None:
        coming = self.levels[1].backend.faults_to_come
        coming.is_down = not coming.is_down

    @rule()
    def restart_the_lowest(self) -> None:
        disk, redis = self.levels
        redis.backend.faults_to_come.is_down = False
        redis.tier = redis.new_tier()
        disk.below = redis.tier
        disk.tier = disk.new_tier()
        for level in self.levels:
            self.loop.run_until_complete(level.tier.start())
            level.follow(level.tier.events_of(level.tier.visible()))

    @rule(level=st.integers(0, 1), num_small=st.integers(4, 10))
    def resize(self, level: int, num_small: int) -> None:
        resized = self.levels[level]
        capacity = num_small * (SIZES[0] + EXTRA_BYTES)
        resized.settings = replace(resized.settings, capacity_bytes=capacity)
        resized.backend.pause = None
        self.loop.run_until_complete(resized.tier.apply(resized.settings, resized.tier.gate))
        resized.backend.pause = lambda _: resized.check()

    @invariant()
    def the_account_is_exact(self) -> None:
        for level in self.levels:
            level.check_at_rest()


TestChain = ChainMachine.TestCase
TestChain.settings = settings(max_examples=60, stateful_step_count=30)

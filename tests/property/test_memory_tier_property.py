"""The memory tier under any sequence of operations: the account is exact, no parent goes before its
child, what is leased keeps its bytes, what is read is what was written."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from policies.base import MIB
from policies.config import MemoryTierConfig
from policies.eviction import FifoEviction, LruEviction
from prefix_store import events
from prefix_store.base import BlockHash
from prefix_store.extents import Extent
from prefix_store.hashing import as_token_ids, extend_chain, routing_root
from prefix_store.memory_tier import MemoryTier
from prefix_store.record import RecordShape, is_block, is_intact, payload, seal, write_header

ROOT = routing_root("m", "s")
SHAPES = {2: RecordShape(2, 64), 4: RecordShape(4, 320)}
"""Two namespaces with records of different sizes share the arena."""

PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=7)
"""Few different blocks, so that prompts extend and fork one another."""


def chain_of(prompt: list[int], size: int) -> tuple[list[BlockHash], list[bytes]]:
    ids = as_token_ids([token for token in prompt for _ in range(size)])
    hashes = extend_chain(routing_root(f"m{size}", "s"), ids, size)
    return hashes, [ids[i * size : (i + 1) * size].tobytes() for i in range(len(hashes))]


class TierMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.view = memoryview(bytearray(1408))
        self.written: list[tuple[int, int]] = []  # ticket, offset
        self.leases: dict[int, list[tuple[Extent, bytes]]] = {}
        self.announced: set[bytes] = set()
        self.parents: dict[bytes, bytes | None] = {}
        self.sizes: dict[bytes, int] = {}
        self.tier = self.new_tier()

    def new_tier(self) -> MemoryTier:
        config = MemoryTierConfig(capacity=MIB, eviction=LruEviction())
        return MemoryTier(config, self.view, 30.0, self.follow)

    def follow(self, changes: list[events.KVEvent]) -> None:
        for change in changes:
            if isinstance(change, events.BlockStored):
                parent = change.parent_block_hash
                for block in change.block_hashes:
                    assert isinstance(block, bytes)
                    assert parent is None or parent in self.announced
                    assert block not in self.announced
                    self.announced.add(block)
                    self.sizes[block] = SHAPES[change.block_size].num_bytes
                    self.parents[block] = parent if isinstance(parent, bytes) else None
                    parent = block
            elif isinstance(change, events.BlockRemoved):
                for block in change.block_hashes:
                    assert isinstance(block, bytes)
                    self.announced.remove(block)
                    assert block not in {self.parents[child] for child in self.announced}

    @rule(prompt=PROMPTS, size=st.sampled_from([2, 4]), start=st.integers(0, 3))
    def write(self, prompt: list[int], size: int, start: int) -> None:
        hashes, tokens = chain_of(prompt, size)
        start = min(start, len(hashes) - 1)
        shape = SHAPES[size]
        parent = hashes[start - 1] if start else None
        places = self.tier.reserve(parent, hashes[start:], shape.num_bytes, self.now)
        for i, place in enumerate(places, start):
            if place is None:
                continue
            extent = place.extent
            record = self.view[extent.offset : extent.offset + extent.num_bytes]
            write_header(record, hashes[i], hashes[i - 1] if i else ROOT, tokens[i], shape)
            payload(record, shape)[:16] = hashes[i]
            seal(record, hashes[i], shape)
            self.written.append((place.ticket, extent.offset))

    @rule(prompt=PROMPTS, size=st.sampled_from([2, 4]))
    def put(self, prompt: list[int], size: int) -> None:
        self.write(prompt, size, 0)
        self.commit(len(self.written), False)

    @rule(prompt=PROMPTS, size=st.sampled_from([2, 4]))
    def read_a_dropped_prompt(self, prompt: list[int], size: int) -> None:
        self.put(prompt, size)
        self.match(prompt, size, 0)
        self.drop(prompt[:1], size)
        self.leased_bytes_never_change()

    @precondition(lambda self: self.written)
    @rule(count=st.integers(1, 9), torn=st.booleans())
    def commit(self, count: int, torn: bool) -> None:
        batch, self.written = self.written[:count], self.written[count:]
        if torn and batch:
            self.view[batch[-1][1]] = 0
        self.tier.commit([ticket for ticket, _ in batch], "salt")

    @precondition(lambda self: self.written)
    @rule()
    def cancel(self) -> None:
        self.tier.cancel([self.written.pop()[0]])

    @rule(prompt=PROMPTS, size=st.sampled_from([2, 4]), lease_from=st.integers(0, 4))
    def match(self, prompt: list[int], size: int, lease_from: int) -> None:
        hashes, tokens = chain_of(prompt, size)
        run = self.tier.match(hashes, lease_from, self.now)
        expected = 0
        while expected < len(hashes) and hashes[expected] in self.announced:
            expected += 1
        assert run.num_blocks == expected
        for i, extent in enumerate(run.leased, lease_from):
            record = self.view[extent.offset : extent.offset + extent.num_bytes]
            shape = SHAPES[size]
            assert is_block(record[: shape.num_bytes], hashes[i], tokens[i], shape)
            assert is_intact(record, hashes[i], shape)
        if run.lease:
            self.leases[run.lease] = [
                (extent, bytes(self.view[extent.offset : extent.offset + extent.num_bytes]))
                for extent in run.leased
            ]

    @precondition(lambda self: self.leases)
    @rule()
    def release(self) -> None:
        lease = next(iter(self.leases))
        del self.leases[lease]
        self.tier.release(lease)

    @rule(prompt=PROMPTS, size=st.sampled_from([2, 4]))
    def drop(self, prompt: list[int], size: int) -> None:
        self.tier.drop(chain_of(prompt, size)[0][-1])

    @rule()
    def clear(self) -> None:
        self.tier.clear()

    @rule(seconds=st.sampled_from([1.0, 25.0, 70.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.tier.expire(self.now)
        if seconds > 60:
            self.leases.clear()
            self.written.clear()
        elif seconds > 20:
            self.leases = {}  # they may have ended; the tier alone knows

    @invariant()
    def the_account_is_exact(self) -> None:
        tier = self.tier
        assert tier.free_bytes + tier.used_bytes + tier.reserved_bytes == tier.capacity_bytes
        assert min(tier.free_bytes, tier.used_bytes, tier.reserved_bytes) >= 0
        assert len(tier) == len(self.announced)
        visible = sum(self.sizes[block] for block in self.announced)
        # Dropped blocks count while somebody reads them, or writes below them.
        in_use = tier.num_leases or tier.reserved_bytes
        assert tier.used_bytes >= visible if in_use else tier.used_bytes == visible

    @invariant()
    def leased_bytes_never_change(self) -> None:
        for held in self.leases.values():
            for extent, content in held:
                assert self.view[extent.offset : extent.offset + extent.num_bytes] == content


class FifoTierMachine(TierMachine):
    def new_tier(self) -> MemoryTier:
        config = MemoryTierConfig(capacity=MIB, eviction=FifoEviction())
        return MemoryTier(config, self.view, 30.0, self.follow)


TestLruTier = TierMachine.TestCase
TestFifoTier = FifoTierMachine.TestCase
TestLruTier.settings = TestFifoTier.settings = settings(max_examples=80, stateful_step_count=40)

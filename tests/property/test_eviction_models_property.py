"""Every eviction policy, in a real index, against a slow and obvious model of its paper.

The model is a tier of lists: it looks at all blocks for each decision. Prompts extend one another,
runs are leased at times, and what both let go must be the same, block by block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.access import PLAIN, Access, Retention
from policies.eviction import (
    ArcEviction,
    FifoEviction,
    GdsfEviction,
    LfuDaEviction,
    LruEviction,
    S3FifoEviction,
)
from policies.eviction.retained import Retained, RetainedQueue
from prefix_store.base import BlockHash
from prefix_store.index import Node, RadixIndex

TOKENS = 32
ATTENTION_TOKENS = 64
PIN_BUDGET = 200


@dataclass(eq=False)
class Item:
    """A block of the model."""

    path: bytes
    inserted: int
    last_used: int
    access: Access
    leased: bool = False
    uses: int = 0
    key: float = 0.0
    pinned_until: float = -math.inf

    @property
    def depth(self) -> int:
        return len(self.path) - 1

    @property
    def size(self) -> int:
        return size_of(self.path)


def size_of(path: bytes) -> int:
    return 32 if path[0] == 0 else 64


def recency(item: Item) -> tuple[float, ...]:
    return (item.last_used, -item.depth)


class LruModel:
    """Also the base of the others: what a policy is told, and what it must answer."""

    def insert(self, item: Item) -> None: ...

    def use(self, run: list[Item]) -> None: ...

    def choose(self, leaves: list[Item], now: float) -> Item:
        return min(leaves, key=recency)

    def evicted(self, item: Item) -> None: ...


class FifoModel(LruModel):
    def choose(self, leaves: list[Item], now: float) -> Item:
        return min(leaves, key=lambda item: item.inserted)


class LfuDaModel(LruModel):
    age = 0.0

    def value(self, item: Item) -> float:
        return item.uses

    def insert(self, item: Item) -> None:
        item.uses = 1
        item.key = self.age + self.value(item)

    def use(self, run: list[Item]) -> None:
        for item in run:
            item.uses += 1
            item.key = self.age + self.value(item)

    def choose(self, leaves: list[Item], now: float) -> Item:
        item = min(leaves, key=lambda item: (item.key, *recency(item)))
        self.age = max(self.age, item.key)
        return item


class GdsfModel(LfuDaModel):
    def value(self, item: Item) -> float:
        cost = TOKENS * (1 + item.depth * TOKENS / ATTENTION_TOKENS)
        return item.uses * cost / item.size


class ArcModel(LruModel):
    def __init__(self) -> None:
        self.t1: list[Item] = []
        self.t2: list[Item] = []
        self.b1: list[bytes] = []
        self.b2: list[bytes] = []
        self.target = 0.0

    def insert(self, item: Item) -> None:
        cache = len(self.t1) + len(self.t2) + 1
        if item.path in self.b1:
            self.target = min(cache, self.target + max(1, len(self.b2) / len(self.b1)))
            self.b1.remove(item.path)
            self.t2.append(item)
        elif item.path in self.b2:
            self.target = max(0, self.target - max(1, len(self.b1) / len(self.b2)))
            self.b2.remove(item.path)
            self.t2.append(item)
        else:
            self.t1.append(item)

    def use(self, run: list[Item]) -> None:
        self.t2 += [item for item in run if item in self.t1]
        self.t1 = [item for item in self.t1 if item not in run]

    def choose(self, leaves: list[Item], now: float) -> Item:
        t1 = sorted((item for item in leaves if item in self.t1), key=recency)
        t2 = sorted((item for item in leaves if item in self.t2), key=recency)
        return (t1 + t2 if len(self.t1) > self.target else t2 + t1)[0]

    def evicted(self, item: Item) -> None:
        if item in self.t1:
            self.t1.remove(item)
            self.b1.append(item.path)
        else:
            self.t2.remove(item)
            self.b2.append(item.path)
        cache = len(self.t1) + len(self.t2)
        while self.b1 and len(self.t1) + len(self.b1) > cache:
            self.b1.pop(0)
        while self.b2 and len(self.b1) + len(self.b2) > cache:
            self.b2.pop(0)


class S3FifoModel(LruModel):
    def __init__(self) -> None:
        self.small: list[Item] = []
        self.main: list[Item] = []
        self.ghosts: list[bytes] = []

    def insert(self, item: Item) -> None:
        if item.path in self.ghosts:
            self.ghosts.remove(item.path)
            self.main.append(item)
        else:
            self.small.append(item)

    def use(self, run: list[Item]) -> None:
        for item in run:
            item.uses = min(3, item.uses + 1)

    def choose(self, leaves: list[Item], now: float) -> Item:
        if sum(item in self.small for item in leaves) >= 0.1 * len(leaves):
            found = self.from_small(leaves) or self.from_main(leaves)
        else:
            found = self.from_main(leaves)
        assert found is not None
        return found

    def from_small(self, leaves: list[Item]) -> Item | None:
        for item in [item for item in self.small if item in leaves]:
            if item.uses <= 1:
                return item
            item.uses = 0
            self.small.remove(item)
            self.main.append(item)
        return None

    def from_main(self, leaves: list[Item]) -> Item | None:
        while waiting := [item for item in self.main if item in leaves]:
            item = waiting[0]
            if item.uses == 0:
                return item
            item.uses -= 1
            self.main.remove(item)
            self.main.append(item)
        return None

    def evicted(self, item: Item) -> None:
        if item in self.small:
            self.small.remove(item)
            self.ghosts.append(item.path)
        else:
            self.main.remove(item)
        limit = int(0.9 * (len(self.small) + len(self.main)))
        self.ghosts = self.ghosts[max(0, len(self.ghosts) - limit) :]


class RetainedModel(LruModel):
    """Retention on top of LRU."""

    def __init__(self) -> None:
        self.items: list[Item] = []

    def insert(self, item: Item) -> None:
        self.items.append(item)
        self.pin([item])

    def use(self, run: list[Item]) -> None:
        self.pin(run)

    def pin(self, run: list[Item]) -> None:
        for item in run:
            now, retention = item.access.time_s, item.access.retention
            if retention.pin:
                held = item.pinned_until > now
                if held or self.pinned_bytes(now) + item.size <= PIN_BUDGET:
                    assert retention.ttl_s is not None
                    item.pinned_until = max(item.pinned_until, now + retention.ttl_s)

    def pinned_bytes(self, now: float) -> int:
        return sum(item.size for item in self.items if item.pinned_until > now)

    def choose(self, leaves: list[Item], now: float) -> Item:
        free = [item for item in leaves if item.pinned_until <= now]
        expired = [item for item in free if self.deadline(item) <= now]
        if expired:
            return min(expired, key=lambda item: (self.deadline(item), -item.depth))
        return min(free, key=lambda item: (item.access.retention.priority, *recency(item)))

    def deadline(self, item: Item) -> float:
        ttl_s = item.access.retention.ttl_s
        return math.inf if ttl_s is None else item.access.time_s + ttl_s

    def evicted(self, item: Item) -> None:
        self.items.remove(item)


@dataclass
class ModelTier:
    """A tier of a few blocks, by the book."""

    model: LruModel
    items: dict[bytes, Item] = field(default_factory=dict)
    clock: int = 0

    def match(self, path: bytes) -> list[Item]:
        run: list[Item] = []
        while len(run) < len(path) and path[: len(run) + 1] in self.items:
            run.append(self.items[path[: len(run) + 1]])
        return run

    def touch(self, run: list[Item], access: Access) -> None:
        self.clock += 1
        for item in run:
            item.last_used, item.access = self.clock, access
        self.model.use(run)

    def insert(self, path: bytes, access: Access) -> None:
        self.clock += 1
        self.items[path] = Item(path, self.clock, self.clock, access)
        self.model.insert(self.items[path])

    def evict(self, now: float, above: bytes) -> bytes | None:
        parents = {path[:-1] for path in self.items} | {above}
        leaves = [
            item
            for path, item in self.items.items()
            if path not in parents and not item.leased and item.pinned_until <= now
        ]
        if not leaves:
            return None
        victim = self.model.choose(leaves, now)
        del self.items[victim.path]
        self.model.evicted(victim)
        return victim.path


@dataclass(frozen=True)
class Step:
    """One request; `hold`: it leases what it found until another one holds."""

    path: bytes
    hold: bool
    retention: Retention = PLAIN


KINDS = {
    "lru": (LruEviction(), LruModel),
    "fifo": (FifoEviction(), FifoModel),
    "lfu_da": (LfuDaEviction(), LfuDaModel),
    "gdsf": (GdsfEviction(attention_tokens=ATTENTION_TOKENS), GdsfModel),
    "arc": (ArcEviction(), ArcModel),
    "s3_fifo": (S3FifoEviction(), S3FifoModel),
}

PATHS = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(bytes)


def steps_with(retention: st.SearchStrategy[Retention]) -> st.SearchStrategy[list[Step]]:
    return st.lists(
        st.builds(Step, PATHS, st.sampled_from([False, False, False, True]), retention),
        min_size=10,
        max_size=60,
    )


def run_both(eviction: Any, model: LruModel, capacity: int, steps: list[Step]) -> RadixIndex[None]:
    """Replay requests on the index and the model; they must let the same blocks go."""
    index, tier = RadixIndex[None](eviction), ModelTier(model)
    held: Node[None] | None = None
    for number, step in enumerate(steps):
        access = Access(float(number), retention=step.retention)
        hashes = [BlockHash(step.path[: depth + 1]) for depth in range(len(step.path))]
        found = index.match(hashes)
        run = tier.match(step.path)
        assert len(found) == len(run)
        index.touch(found, access)
        tier.touch(run, access)
        if step.hold and found:
            if held is not None:
                tier.items[held.hash].leased = False
                index.release([held])
            held = found[-1]
            index.lease([held])
            tier.items[held.hash].leased = True
        for block_hash in hashes[len(found) :]:
            above = BlockHash(block_hash[:-1]) or None
            parent = index.get(above) if above is not None else None
            index.lease([parent] if parent else [])
            gone = expected = None
            if len(index) >= capacity:
                victim = index.evict(access.time_s)
                gone = victim.hash if victim is not None else None
                expected = tier.evict(access.time_s, block_hash[:-1])
                assert gone == expected
            index.release([parent] if parent else [])
            if len(index) >= capacity:
                break
            index.insert(
                above, block_hash, None,
                access=access, num_tokens=TOKENS, num_bytes=size_of(block_hash),
            )  # fmt: skip
            tier.insert(block_hash, access)
    return index


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(st.integers(2, 12), st.booleans(), steps_with(st.just(PLAIN)))
def test_a_policy_lets_go_what_its_model_lets_go(
    kind: str, capacity: int, retained: bool, steps: list[Step]
) -> None:
    """With retention on top but no rules, too."""
    eviction, model = KINDS[kind]
    run_both(Retained(eviction) if retained else eviction, model(), capacity, steps)


RETENTIONS = [
    PLAIN,
    Retention(priority=10),
    Retention(priority=90),
    Retention(ttl_s=2.25),
    Retention(ttl_s=7.5, priority=90),
    Retention(ttl_s=4.75, pin=True),
    Retention(ttl_s=12.125, priority=10, pin=True),
]


@settings(max_examples=150, deadline=None)
@given(st.integers(2, 12), steps_with(st.sampled_from(RETENTIONS)))
def test_retention_holds_on_top_of_the_kind(capacity: int, steps: list[Step]) -> None:
    """Pins within the budget stay, then expired blocks go, then by priority, then by the kind."""
    model = RetainedModel()
    index = run_both(Retained(LruEviction(), PIN_BUDGET), model, capacity, steps)
    queue = index._queue
    assert isinstance(queue, RetainedQueue)
    now = float(len(steps))
    pins = {pin.block.hash: pin.time_s for pin in queue.pinned(now)}
    assert pins == {i.path: i.pinned_until for i in model.items if i.pinned_until > now}
    assert queue.pinned_bytes == model.pinned_bytes(now) <= PIN_BUDGET

"""Reuse-aware eviction, driven as a tier drives it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.access import Access, Stop
from policies.eviction.gap_model import bucket_of
from policies.eviction.request_runs import GAP_CLASSES_S, MAX_USES, NEW, RUNNING, Ghost
from policies.eviction.reuse_aware import GHOSTS, ReuseAwareQueue

TOKENS = 50_000
"""Of a block: so many that one use says much, and categories soon differ."""


@dataclass(eq=False)
class Leaf:
    """A prompt of one block, as policies see it."""

    hash: bytes
    access: Access
    last_used: int = 0
    inserted: int = 0
    depth: int = 0
    num_tokens: int = TOKENS
    num_bytes: int = 64
    mark: Any = None
    uses: list[float] = field(default_factory=list)
    """When it was used, for the model."""

    def path(self) -> tuple[str, ...]:
        """Its category, from its own history."""
        access, times = self.access, self.uses
        head = RUNNING if access.stop is Stop.UNKNOWN else ("ended", access.stop.value)
        if len(times) == 1:
            return (*head, "new")
        gap_class = 1 + sum(times[-1] - times[-2] >= bound for bound in GAP_CLASSES_S)
        return (*head, f"used {min(len(times) - 1, MAX_USES)}", f"gap {gap_class}")

    def worth(self, queue: ReuseAwareQueue[Leaf], now: float) -> float:
        began_s = self.access.time_s if self.access.ended_s is None else self.access.ended_s
        return queue.model.curve(self.path()).worth[bucket_of(now - began_s)]


class Scene:
    """A tier of one-block prompts, and a model of it without cells, runs and timers: each block's
    category and age from its own uses, the victim by a search of all."""

    def __init__(self) -> None:
        self.queue = ReuseAwareQueue[Leaf]()
        # Whether LRU rules is the guard's to say, and tested there.
        self.queue.guard.requested = lambda tokens: None  # type: ignore[method-assign]
        self.here: dict[int, Leaf] = {}
        self.leased: set[int] = set()
        self.history: dict[int, list[float]] = {}
        self.now = 0.0
        self.clock = 0

    def candidates(self) -> list[Leaf]:
        return [leaf for number, leaf in self.here.items() if number not in self.leased]

    def insert(self, number: int) -> None:
        if number not in self.here:
            uses = self.history.setdefault(number, [])
            uses.append(self.now)
            access = Access(time_s=self.now, num_tokens=TOKENS)
            leaf = Leaf(bytes([number]), access, self.clock, self.clock, uses=uses)
            self.here[number] = leaf
            self.leased.discard(number)
            self.queue.insert(leaf)
            self.queue.add(leaf)

    def use(self, number: int) -> None:
        leaf = self.here.get(number)
        if leaf is not None:
            leaf.access, leaf.last_used = Access(time_s=self.now, num_tokens=TOKENS), self.clock
            leaf.uses.append(self.now)
            self.queue.use([leaf])
            self.offer(number)

    def end(self, number: int) -> None:
        leaf = self.here.get(number)
        if leaf is not None and leaf.access.stop is Stop.UNKNOWN:
            leaf.access.stop = Stop.TOOL_USE if number % 2 else Stop.END_TURN
            leaf.access.ended_s = self.now
            self.offer(number)

    def lease(self, number: int) -> None:
        if number in self.here:
            self.leased ^= {number}
            self.queue.discard(self.here[number])
            self.offer(number)

    def offer(self, number: int) -> None:
        if number not in self.leased:
            self.queue.add(self.here[number])

    def admits(self, number: int) -> None:
        if number in self.here:
            return
        uses = [*self.history.get(number, []), self.now]
        newcomer = Leaf(bytes([number]), Access(time_s=self.now), uses=uses)
        admitted = self.queue.admits(newcomer, self.now)
        worths = [leaf.worth(self.queue, self.now) for leaf in self.candidates()]
        worth = newcomer.worth(self.queue, self.now)
        assert admitted == (worth >= min(worths, default=0.0))
        if not admitted:
            self.history[number] = uses

    def pop(self, number: int) -> None:
        del number
        candidates = self.candidates()
        assert len(self.queue) == len(candidates)
        worths = {leaf: leaf.worth(self.queue, self.now) for leaf in candidates}
        victim = self.queue.pop(self.now)
        if victim is None:
            assert not candidates
            return
        assert worths[victim] == min(worths.values())
        equals = [leaf for leaf in candidates if leaf.path() == victim.path()]
        equals = [leaf for leaf in equals if worths[leaf] == worths[victim]]
        assert victim.last_used == min(leaf.last_used for leaf in equals)
        self.queue.remove(victim)
        del self.here[victim.hash[0]]


STEPS = ["insert", "use", "use", "end", "pop", "lease", "admits"]


@pytest.mark.parametrize("seed", range(12))
def test_the_victim_is_worth_the_least_by_a_search_of_all(seed: int) -> None:
    """The queue takes, and lets in, what the model would. Low numbers come again soon, high ones
    late, so that there is something to learn."""
    rng, scene = random.Random(seed), Scene()
    for _ in range(800):
        number = rng.randrange(rng.randrange(1, 24))
        scene.clock += 1
        scene.now += rng.choice([0.1013, 0.3107, 1.0171, 3.0193, 20.0319])
        getattr(scene, rng.choice(STEPS))(number)


def test_reuse_after_a_tool_call_is_learned() -> None:
    """Prompts that ended with a tool call come again after 10 s, those that ended a turn do not:
    the finished turn goes first, although it was used later."""
    queue, now = ReuseAwareQueue[Leaf](), 0.0
    for number in range(300):
        now += 20.0
        stop = Stop.TOOL_USE if number % 2 else Stop.END_TURN
        leaf = Leaf(number.to_bytes(2, "big"), Access(time_s=now, num_tokens=50_000), number)
        leaf.num_tokens = 50_000
        queue.insert(leaf)
        leaf.access.stop, leaf.access.ended_s = stop, now + 1.0
        queue.add(leaf)
        if stop is Stop.TOOL_USE:
            leaf.access = Access(time_s=now + 10.0, num_tokens=50_000, stop=Stop.LENGTH)
            queue.use([leaf])
        queue.discard(leaf)
        queue.remove(leaf)
    tool = Leaf(b"tool", Access(time_s=now, stop=Stop.TOOL_USE, ended_s=now), 1000)
    turn = Leaf(b"turn", Access(time_s=now + 2, stop=Stop.END_TURN, ended_s=now + 2), 1001)
    for leaf in (tool, turn):
        queue.insert(leaf)
        queue.add(leaf)
    assert queue.model.curve(("ended", "tool_use")).worth[5] > 0.0
    assert not queue.guard.lru_rules
    assert queue.pop(now + 3.0) is turn


def prompt(access: Access, name: bytes, depths: range) -> list[Leaf]:
    """Blocks of one prompt."""
    return [Leaf(name + bytes([d]), access, depth=d, num_tokens=100) for d in depths]


def test_what_was_evicted_block_by_block_is_remembered_as_one() -> None:
    """Tail first: the ghost of the head stands for all that went before it."""
    queue = ReuseAwareQueue[Leaf]()
    blocks = prompt(Access(time_s=1.0, num_tokens=800), b"a", range(8))
    for block in blocks:
        queue.insert(block)
    for block in reversed(blocks):
        queue.remove(block)
    assert [(ghost.hash, ghost.tokens) for ghost in queue._ghosts.values()] == [(b"a\x00", 800)]


def test_reuse_of_what_is_gone_is_learned_without_its_tail_by_name() -> None:
    """The prompt comes again: its first missing block tells that the next ones were known too."""
    queue = ReuseAwareQueue[Leaf]()
    for block in reversed(old := prompt(Access(time_s=1.0, num_tokens=800), b"a", range(8))):
        queue.insert(block)
    for block in reversed(old):
        queue.remove(block)
    again = prompt(Access(time_s=11.0, num_tokens=1000), b"a", range(10))
    for block in again:
        queue.insert(block)
    assert [block.mark.past.uses for block in again] == [1] * 8 + [0] * 2
    reused = queue.model.curve(("running",)).seen(11.0).reused
    assert reused[bucket_of(10.0)] == sum(reused) == 800


def test_the_rest_of_a_refused_prompt_is_remembered_too() -> None:
    """A refusal ends the prompt: what follows is never offered."""
    queue = ReuseAwareQueue[Leaf]()
    head, refused = prompt(Access(time_s=1.0, num_tokens=900), b"a", range(2))
    queue.insert(head)
    queue._refuse(queue._request(refused.access), refused)
    assert [ghost.tokens for ghost in queue._ghosts.values()] == [800]
    queue._refuse(queue._request(refused.access), refused)
    assert [ghost.tokens for ghost in queue._ghosts.values()] == [800]


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6), st.booleans()), max_size=60))
def test_tokens_are_watched_once(requests: list[tuple[int, int, bool]]) -> None:
    """Each token that is here or remembered is in exactly one run, whatever happened to it."""
    queue = ReuseAwareQueue[Leaf]()
    queue.guard.capacity = 500
    tier: dict[bytes, Leaf] = {}
    for clock, (name, length, shrink) in enumerate(requests):
        access = Access(time_s=float(clock), num_tokens=100 * length)
        chain = prompt(access, bytes([name]), range(length))
        run = [tier[block.hash] for block in chain if block.hash in tier]
        for block in run:
            block.access, block.last_used = access, clock
        queue.use(run)
        for block in chain:
            if block.hash not in tier:
                tier[block.hash] = block
                queue.insert(block)
        if shrink:
            for block in sorted(tier.values(), key=lambda each: -each.depth)[:3]:
                queue.remove(tier.pop(block.hash))
        runs = {block.mark for block in tier.values()}
        runs |= {ghost.run for ghost in queue._ghosts.values()}
        runs |= {r.cover.run for r in queue._requests.values() if r.cover is not None}
        covered = sum(r.cover.tokens for r in queue._requests.values() if r.cover is not None)
        ghosts = sum(ghost.tokens for ghost in queue._ghosts.values())
        assert sum(run.tokens for run in runs) == 100 * len(tier) + ghosts + covered
        assert queue.guard._stacked == min(500, sum(run.stacked for run in runs))
        watching = sum(sum(curve._watching) for curve in queue.model._curves.values())
        assert watching == sum(run.tokens for run in runs)


def test_a_request_that_looks_twice_reuses_nothing() -> None:
    """An engine asks again while it waits for a place: that says nothing about reuse."""
    queue = ReuseAwareQueue[Leaf]()
    access = Access(time_s=1.0, num_tokens=300)
    blocks = prompt(access, b"a", range(3))
    for block in blocks:
        queue.insert(block)
    queue.use(blocks)
    queue.use(blocks)
    assert {block.mark.past.uses for block in blocks} == {0}
    assert sum(queue.model.curve(("running",)).seen(2.0).reused) == 0


def test_blocks_that_come_late_were_not_watched_before() -> None:
    """An answer takes a minute to be stored: its tokens were not there to be used until then."""
    queue = ReuseAwareQueue[Leaf]()
    access = Access(time_s=100.0, num_tokens=200)
    first, late = prompt(access, b"a", range(2))
    queue.insert(first)
    queue._advance(160.0)
    queue.insert(late)
    queue._advance(170.0)
    watched = queue.model.curve(("running",)).seen(170.0).watched
    assert abs(sum(watched) - (100 * 70.0 + 100 * 10.0)) < 1e-6


def test_a_ghost_that_is_replaced_is_not_watched_any_more() -> None:
    """The same block left twice: only the last time counts."""
    queue = ReuseAwareQueue[Leaf]()
    for clock in (1.0, 2.0):
        (block,) = prompt(Access(time_s=clock, num_tokens=100), b"a", range(1))
        queue._take(
            queue._request(block.access), run := queue._run(queue._request(block.access), NEW), 100
        )
        queue._remember(Ghost(block.hash, run, 100, 0))
    assert sum(sum(curve._watching) for curve in queue.model._curves.values()) == 100
    assert queue.guard._stacked == 100


def test_memory_is_in_proportion_to_the_tier() -> None:
    """Prompts that never come again leave nothing behind in the long run."""
    queue = ReuseAwareQueue[Leaf]()
    for number in range(6000):
        leaf = Leaf(number.to_bytes(4, "big"), Access(time_s=number * 0.01, num_tokens=TOKENS))
        queue.insert(leaf)
        queue.add(leaf)
        if number > 20:
            victim = queue.pop(number * 0.01)
            assert victim is not None
            queue.remove(victim)
    assert len(queue._ghosts) <= GHOSTS + 2 * 21
    assert len(queue._requests) <= 512
    assert len(queue._timers) <= 2 * (GHOSTS + 2 * 21) + 1024


def test_lengths_of_prompts_are_seen_where_nobody_tells_them() -> None:
    """Without a gateway: what was taken in of a prompt is its length."""
    queue = ReuseAwareQueue[Leaf]()
    for number in range(5):
        for block in prompt(Access(time_s=float(number)), bytes([number]), range(3)):
            queue.insert(block)
    assert queue.guard._prompt_tokens > 200

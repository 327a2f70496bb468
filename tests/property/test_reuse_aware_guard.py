"""Reuse-aware eviction never falls far behind LRU, also on traffic that is made to fool it."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from policies.access import Access, Stop
from policies.eviction import Eviction, LruEviction, ReuseAwareEviction, gap_model
from policies.eviction.gap_model import BUCKETS
from policies.eviction.lru_guard import GRACE_PROMPTS, LruGuard
from prefix_store.base import BlockHash
from prefix_store.simulation.tier import BlockShape, SimulatedTier

BLOCKS = 8
"""Of a prompt."""

SHAPE = BlockShape(num_tokens=32, num_bytes=1)
CAPACITY = 20 * BLOCKS

COUNTED_FROM = 1500
"""What was gained before pays for nothing."""

Prompt = tuple[float, int, Stop]
"""When, which, and how the answer ends."""


def habits_change(rng: random.Random) -> Iterator[Prompt]:
    """Prompts come again after 30 s, never sooner, so keeping the old ones is right; from one
    moment on they come again at once or never, so it is wrong."""
    number, now = 0, 0.0
    for _ in range(1500):
        now += 1.0
        number += 1
        yield now, number if number % 2 else number - 31, Stop.TOOL_USE
    for _ in range(4000):
        now += 1.0
        number += 1
        yield now, number if rng.random() < 0.5 else number - rng.randrange(2, 6), Stop.TOOL_USE


def labels_lie(rng: random.Random) -> Iterator[Prompt]:
    """What tool calls and ended turns mean is swapped again and again."""
    number, now = 0, 0.0
    recent: list[int] = []
    for step in range(6000):
        now += 1.0
        again = (step // 500) % 2 == 0
        if recent and rng.random() < 0.5:
            yield now, recent.pop(rng.randrange(len(recent))), Stop.TOOL_USE
            continue
        number += 1
        stop = Stop.TOOL_USE if rng.random() < 0.5 else Stop.END_TURN
        if (stop is Stop.TOOL_USE) == again:
            recent = [*recent[-8:], number]
        yield now, number, stop


def popularity_drifts(rng: random.Random) -> Iterator[Prompt]:
    """What was popular is not any more: past uses promise nothing."""
    for step in range(6000):
        rank = int(rng.paretovariate(0.7))
        yield step * 1.0, step // 4 - min(rank, 500), Stop.UNKNOWN


def hit_tokens(eviction: Eviction, prompts: list[Prompt]) -> int:
    """Replayed in a tier of its own."""
    tier, hits = SimulatedTier("memory", CAPACITY, eviction), 0
    for position, (time_s, number, stop) in enumerate(prompts):
        chain = [BlockHash(f"{number} {depth}".encode()) for depth in range(BLOCKS)]
        access = Access(time_s=time_s, num_tokens=BLOCKS * SHAPE.num_tokens)
        run = tier.match(chain, access)
        hits += len(run) * SHAPE.num_tokens if position >= COUNTED_FROM else 0
        tier.take_in(run, chain[len(run) :], SHAPE, access, time_s)
        access.stop, access.ended_s = stop, time_s
        tier.reconsider(chain, access)
    return hits


@pytest.mark.parametrize("traffic", [habits_change, labels_lie, popularity_drifts])
def test_it_is_nowhere_far_below_lru(traffic: object) -> None:
    """At most half a percent of the requested tokens, beside the grace at the start."""
    assert callable(traffic)
    prompts: list[Prompt] = list(traffic(random.Random(5)))
    prompt_tokens = BLOCKS * SHAPE.num_tokens
    allowed = (0.005 * (len(prompts) - COUNTED_FROM) + 2 * GRACE_PROMPTS) * prompt_tokens
    assert hit_tokens(ReuseAwareEviction(), prompts) >= hit_tokens(LruEviction(), prompts) - allowed


@pytest.mark.parametrize("traffic", [habits_change, labels_lie, popularity_drifts])
def test_lru_rules_when_the_predictions_are_nonsense(
    traffic: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was used last goes first or does not come in: with LRU's guard that costs little,
    without it nearly everything."""
    assert callable(traffic)
    prompts: list[Prompt] = list(traffic(random.Random(5)))
    asked = (len(prompts) - COUNTED_FROM) * BLOCKS * SHAPE.num_tokens
    lru = hit_tokens(LruEviction(), prompts)
    nonsense = [float(bucket) for bucket in range(BUCKETS)]
    monkeypatch.setattr(gap_model, "worths", lambda _: nonsense)
    guarded = hit_tokens(ReuseAwareEviction(), prompts)
    monkeypatch.setattr(LruGuard, "settle", lambda *_, **__: None)
    alone = hit_tokens(ReuseAwareEviction(), prompts)
    grace = 2 * GRACE_PROMPTS * BLOCKS * SHAPE.num_tokens
    assert guarded >= lru - 0.005 * asked - grace
    assert alone < lru - 0.05 * asked

"""Rates of reuse per age, learned from what was watched and what was reused."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.eviction.gap_model import (
    BUCKETS,
    EDGES_S,
    Curve,
    GapModel,
    bucket_of,
    worths,
)

PROMPT = 1000
"""Tokens."""

WIDTHS_S = [b - a for a, b in zip(EDGES_S, [*EDGES_S[1:], EDGES_S[-1] + 1e6], strict=True)]


@pytest.mark.parametrize("bucket", range(BUCKETS))
def test_a_bucket_begins_at_its_edge(bucket: int) -> None:
    """The edge belongs to the bucket that begins there."""
    assert bucket_of(EDGES_S[bucket]) == bucket
    assert bucket_of(EDGES_S[bucket] + WIDTHS_S[bucket] / 2) == bucket


def test_a_clock_that_went_back_is_age_zero() -> None:
    """A negative age counts as none."""
    assert bucket_of(-3.0) == 0


def slow_worth(rates: list[float], start: int) -> float:
    """Over every moment to give up: chance of reuse by expected time."""
    best = chance = duration_s = 0.0
    survives = 1.0
    for rate, width_s in zip(rates[start:], WIDTHS_S[start:], strict=True):
        here = -math.expm1(-rate * width_s)
        chance += survives * here
        duration_s += survives * here / rate
        survives *= 1.0 - here
        best = max(best, chance / duration_s)
    return best


@settings(max_examples=100)
@given(st.lists(st.floats(1e-6, 1.0), min_size=BUCKETS, max_size=BUCKETS))
def test_worth_is_the_best_yield_over_all_moments_to_give_up(rates: list[float]) -> None:
    """The stack of stretches finds what trying them all finds."""
    found = worths(rates)
    assert found == pytest.approx([slow_worth(rates, k) for k in range(BUCKETS)], rel=1e-6)


def test_with_nothing_learned_older_is_worth_less() -> None:
    """Then the order is LRU's."""
    worth = GapModel().curve(("anything",)).worth
    assert worth == sorted(worth, reverse=True)
    assert len(set(worth)) == BUCKETS


def test_what_leaves_the_view_says_nothing_of_later_ages() -> None:
    """Gaps with a constant rate, half of them cut off at random: the rate is found all the same."""
    rng, rate = random.Random(3), 0.05
    curve = Curve(None)
    for _ in range(20_000):
        gap_s, cut_s = rng.expovariate(rate), rng.expovariate(rate)
        end_s = min(gap_s, cut_s)
        last = bucket_of(end_s)
        tokens = PROMPT
        curve.skip(last, tokens)
        curve.enter(last, EDGES_S[last], tokens)
        curve.leave(last, EDGES_S[last], end_s, tokens)
        if gap_s < cut_s:
            curve.reuse(last, tokens)
    curve.fit(curve.seen(0.0), PROMPT)
    for age_s in (1.0, 5.0, 20.0):
        assert curve.worth[bucket_of(age_s)] == pytest.approx(rate, rel=0.12)


def test_what_is_still_there_counts_as_watched() -> None:
    """A thousand prompts wait and none was used again: waiting is worth less than it was."""
    model = GapModel()
    curve = model.curve(("a",))
    before = curve.worth[0]
    for _ in range(1000):
        curve.enter(0, 0.0, PROMPT)
    while not model.requested(0.6, PROMPT):
        pass
    assert curve.worth[0] < before / 4


def test_a_category_that_saw_little_follows_the_one_above_it() -> None:
    """What all agents do holds for a new kind of agent too."""
    model = GapModel()
    known, new = model.curve(("all", "known")), model.curve(("all", "new"))
    bucket = bucket_of(10.0)
    for _ in range(100):
        known.skip(bucket, PROMPT)
        known.enter(bucket, 10.0, PROMPT)
        known.leave(bucket, 10.0, 12.0, PROMPT)
        known.reuse(bucket, PROMPT)
    while not model.requested(0.0, PROMPT):
        pass
    assert new.worth[0] > 0.5 * known.worth[0]
    assert model.curve(("all", "later")).worth == model.curve(("all",)).worth
    assert known.worth[0] > 10 * GapModel().curve(("all",)).worth[bucket]


def test_old_experience_fades() -> None:
    """After many requests what was learned long ago counts less than what is new."""
    curve = Curve(None)
    curve.reuse(0, 1000.0)
    curve.skip(1, 1000.0)
    curve.forget(0.25)
    sums = curve.seen(0.0)
    assert sums.reused[0] == 250.0
    assert sums.watched[0] == pytest.approx(250.0 * EDGES_S[1])

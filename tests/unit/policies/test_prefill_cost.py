"""What prefill costs, learned from an engine's steps."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.prefill_cost import ENOUGH, PrefillCost, attended

BASE_S, LINEAR_S, QUADRATIC_S = 5e-3, 2e-5, 3e-9


def seconds_of(context: int, num_tokens: int) -> float:
    """What a step of the imitated engine takes."""
    return BASE_S + LINEAR_S * num_tokens + QUADRATIC_S * attended(context, num_tokens)


def learned(steps: list[tuple[int, int]], slower: float = 1.0) -> PrefillCost:
    cost = PrefillCost()
    for context, num_tokens in steps:
        seconds = slower * seconds_of(context, num_tokens)
        cost.observe(num_tokens, attended(context, num_tokens), seconds)
    return cost


STEPS = [(0, 64), (0, 512), (512, 512), (4096, 512), (0, 2048), (8192, 128)] * 3


def test_nothing_is_predicted_from_too_little() -> None:
    """Two steps fit anything."""
    assert learned(STEPS[: ENOUGH - 1]).seconds(0, 100) is None
    assert learned(STEPS[:ENOUGH]).seconds(0, 100) is not None


@pytest.mark.parametrize(("context", "num_tokens"), [(0, 1000), (3000, 500), (30_000, 2000)])
def test_a_prediction_is_what_the_engine_takes_without_its_base(
    context: int, num_tokens: int
) -> None:
    """Within and beyond what was observed; a step takes the base anyway."""
    expected = seconds_of(context, num_tokens) - BASE_S
    assert learned(STEPS).seconds(context, num_tokens) == pytest.approx(expected, rel=0.02)


def test_no_tokens_cost_nothing() -> None:
    """At any context."""
    assert learned(STEPS).seconds(5000, 0) == 0.0


def test_an_engine_that_became_slower_is_noticed() -> None:
    """Old steps fade."""
    cost = learned(STEPS)
    for context, num_tokens in STEPS * 12:
        seconds = 3 * seconds_of(context, num_tokens)
        cost.observe(num_tokens, attended(context, num_tokens), seconds)
    expected = 3 * (seconds_of(0, 2000) - BASE_S)
    assert cost.seconds(0, 2000) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("seconds", [math.nan, math.inf, 0.0, -1.0])
def test_times_that_no_clock_measures_are_left_out(seconds: float) -> None:
    """One of them would spoil all sums for good."""
    cost = learned(STEPS)
    before = cost.seconds(100, 1000)
    cost.observe(100, attended(0, 100), seconds)
    assert cost.seconds(100, 1000) == before
    cost.observe(100, math.nan, 1.0)
    cost.observe(0, 0.0, 1.0)
    assert cost.seconds(100, 1000) == before


@given(
    steps=st.lists(
        st.tuples(st.integers(0, 200_000), st.integers(1, 20_000), st.floats(1e-6, 100)),
        min_size=ENOUGH,
        max_size=40,
    ),
    context=st.integers(0, 200_000),
    num_tokens=st.integers(0, 20_000),
)
def test_predictions_are_finite_not_negative_and_grow_with_the_prompt(
    steps: list[tuple[int, int, float]], context: int, num_tokens: int
) -> None:
    """Whatever was observed, noise included."""
    cost = PrefillCost()
    for earlier, count, seconds in steps:
        cost.observe(count, attended(earlier, count), seconds)
    short, long = cost.seconds(context, num_tokens), cost.seconds(context, num_tokens + 100)
    assert short is not None
    assert long is not None
    assert 0.0 <= short <= long < math.inf

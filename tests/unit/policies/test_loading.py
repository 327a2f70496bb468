"""Loading policies: which blocks below memory are loaded, which are computed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from policies.loading import (
    AlwaysLoading,
    FasterThanRecomputeLoading,
    LoadCandidate,
    LoadDecision,
    NeverLoading,
)

STEPS = st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), max_size=20)
"""Seconds that each block adds: to load it, to compute it."""


def candidate_of(load: list[float | None], prefill: list[float | None]) -> LoadCandidate:
    return LoadCandidate(load, prefill)


def test_always_takes_all_and_never_takes_none() -> None:
    """Whatever it costs, known or not."""
    candidate = candidate_of([9.0, None], [1.0, None])
    assert AlwaysLoading().decide(candidate) == LoadDecision(2)
    assert NeverLoading().decide(candidate) == LoadDecision(0)


def test_nothing_to_load_is_no_load() -> None:
    """For every kind."""
    for policy in (AlwaysLoading(), NeverLoading(), FasterThanRecomputeLoading()):
        assert policy.decide(candidate_of([], [])).num_blocks == 0


def test_a_fast_tier_is_loaded_whole() -> None:
    """It is given up when computing would have been done."""
    decision = FasterThanRecomputeLoading().decide(candidate_of([0.1, 0.2], [1.0, 2.0]))
    assert decision == LoadDecision(2, 2.0)


def test_a_slow_tier_is_left_alone() -> None:
    """At every length."""
    decision = FasterThanRecomputeLoading().decide(candidate_of([1.0, 2.0], [1.0, 2.1]))
    assert decision.num_blocks == 0


def test_a_run_ends_where_a_slower_tier_begins() -> None:
    """The first two blocks come from disk, the others from a slow link."""
    candidate = candidate_of([0.1, 0.2, 5.2, 10.2], [1.0, 2.0, 3.0, 4.0])
    assert FasterThanRecomputeLoading().decide(candidate) == LoadDecision(2, 2.0)


def test_late_tokens_pay_for_the_latency_of_early_ones() -> None:
    """One block is not worth the wait, four are."""
    candidate = candidate_of([1.0, 1.1, 1.2, 1.3], [0.5, 1.0, 1.5, 2.0])
    assert FasterThanRecomputeLoading().decide(candidate) == LoadDecision(4, 2.0)


def test_an_unmeasured_tier_is_tried_for_as_long_as_computing_takes() -> None:
    """That is how it becomes known."""
    decision = FasterThanRecomputeLoading(margin=0.5).decide(candidate_of([None, None], [1.0, 3.0]))
    assert decision == LoadDecision(2, 1.5)


def test_an_engine_that_told_nothing_yet_loads_whatever_is_there() -> None:
    """No limit is known either."""
    decision = FasterThanRecomputeLoading().decide(candidate_of([5.0, 9.0], [None, None]))
    assert decision == LoadDecision(2)


@given(steps=STEPS, margin=st.floats(0.1, 1.0))
def test_no_other_length_gains_more(steps: list[tuple[float, float]], margin: float) -> None:
    """Of all lengths at which loading is fast enough, the one that saves most."""
    load: list[float | None] = []
    prefill: list[float | None] = []
    lengths = [(0, 0.0)]
    loading = computing = 0.0
    for i, (load_s, prefill_s) in enumerate(steps, 1):
        loading, computing = loading + load_s, computing + prefill_s
        load.append(loading)
        prefill.append(computing)
        if loading <= margin * computing:
            lengths.append((i, computing - loading))
    decision = FasterThanRecomputeLoading(margin=margin).decide(candidate_of(load, prefill))
    gains = dict(lengths)
    assert gains[decision.num_blocks] == max(gains.values())


@pytest.mark.parametrize("margin", [0.0, -1.0, 1.1])
def test_a_margin_that_cannot_be_is_refused(margin: float) -> None:
    """It is a share of the prefill time."""
    with pytest.raises(ValidationError):
        FasterThanRecomputeLoading(margin=margin)

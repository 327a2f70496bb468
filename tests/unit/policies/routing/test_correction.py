"""Bounded factors."""

from __future__ import annotations

import math

import pytest

from policies.routing.correction import Correction


def learned(ratio: float, times: int = 200, bound: float = 4.0) -> Correction:
    correction = Correction(bound=bound)
    for _ in range(times):
        correction.observe(1.0, ratio)
    return correction


def test_without_observations_nothing_is_corrected() -> None:
    """The factor is 1."""
    assert Correction(bound=2.0).factor == 1.0


@pytest.mark.parametrize("ratio", [0.5, 1.0, 3.0])
def test_a_persistent_ratio_is_learned(ratio: float) -> None:
    """Above and below."""
    assert learned(ratio).factor == pytest.approx(ratio, rel=0.02)


def test_a_first_few_observations_count_much() -> None:
    """A replica that is twice as slow is known as slow soon."""
    assert learned(2.0, times=3).factor > 1.4


@pytest.mark.parametrize(("ratio", "bound"), [(1000.0, 4.0), (0.001, 0.25)])
def test_the_factor_is_bounded(ratio: float, bound: float) -> None:
    """Both ways."""
    assert learned(ratio).factor == pytest.approx(bound)


@pytest.mark.parametrize(("ratio", "factor"), [(1.3, 1.0), (0.7, 1.0), (2.0, 2.0), (0.5, 0.5)])
def test_small_differences_can_be_ignored(ratio: float, factor: float) -> None:
    """Chance alone makes such ones of equals; larger ones count in full."""
    correction = Correction(bound=4.0, ignored=1.5)
    for _ in range(200):
        correction.observe(1.0, ratio)
    assert correction.factor == pytest.approx(factor, rel=0.02)


def test_an_outlier_counts_no_more_than_a_twofold_error() -> None:
    """However far out it is."""
    correction = learned(1.0)
    correction.observe(1.0, 1e9)
    assert correction.factor < 1.05


def test_rare_outliers_do_not_move_it_away() -> None:
    """One in twenty, all on the same side."""
    correction = Correction(bound=4.0)
    for number in range(400):
        correction.observe(1.0, 100.0 if number % 20 == 0 else 1.0)
    assert correction.factor < 1.15


@pytest.mark.parametrize("broken", [math.nan, math.inf, -1.0])
def test_impossible_times_teach_nothing(broken: float) -> None:
    """On either side."""
    correction = learned(2.0)
    before = correction.factor
    correction.observe(broken, 1.0)
    correction.observe(1.0, broken)
    assert correction.factor == before


def test_times_below_the_resolution_teach_nothing() -> None:
    """A microsecond instead of a nanosecond is not a thousand times as long."""
    correction = Correction(bound=4.0)
    for _ in range(100):
        correction.observe(1e-9, 1e-6)
    assert correction.factor == pytest.approx(1.0, rel=0.01)

"""Histogram buckets and their quantiles."""

import numpy as np
import pytest

from gateway.accounts.histogram import MAX_S, MIN_S, NUM_BUCKETS, bucket_of, duration_of, quantiles


def counts_of(*durations_s: float) -> np.ndarray:
    counts = np.zeros(NUM_BUCKETS)
    for duration_s in durations_s:
        counts[bucket_of(duration_s)] += 1
    return counts


def test_nothing_counted_has_no_quantiles() -> None:
    """An empty histogram answers None, not zero."""
    assert quantiles(np.zeros(NUM_BUCKETS), (0.5, 0.99)) is None


def test_quantiles_are_nearest_rank() -> None:
    """Of 100 values, p99 is the 99th and p100 the last."""
    counts = counts_of(*[0.001] * 98, 0.1, 10.0)
    p50, p98, p99, p100 = quantiles(counts, (0.5, 0.98, 0.99, 1.0)) or ()
    assert p50 == p98 == pytest.approx(0.001, rel=0.05)
    assert p99 == pytest.approx(0.1, rel=0.05)
    assert p100 == pytest.approx(10.0, rel=0.05)


def test_out_of_range_durations_stay_in_the_end_buckets() -> None:
    """Zero reads as the smallest duration, a day as the largest."""
    assert bucket_of(0.0) == bucket_of(MIN_S) == 0
    assert bucket_of(86400.0) == NUM_BUCKETS - 1
    assert duration_of(NUM_BUCKETS - 1) == pytest.approx(MAX_S, rel=0.11)
    assert duration_of(0) == MIN_S

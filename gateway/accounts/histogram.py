"""Durations in logarithmic buckets: quantiles with a bounded relative error in fixed memory.

The layout is DDSketch's (Masson, Rim, Lee: "DDSketch", VLDB 2019) with a fixed range, so buckets
are plain positions in an array and two histograms are merged by adding them.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

RELATIVE_ERROR = 0.05
"""A quantile is at most this far from the duration at its rank, within the range below."""

MIN_S = 1e-5
"""Shorter durations share the first bucket and read as this one (10 us: at most that much off)."""

MAX_S = 1e4
"""Longer durations share the last bucket and read as about this one."""

_GROWTH = (1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)
_LOG_GROWTH = math.log(_GROWTH)
NUM_BUCKETS = math.ceil(math.log(MAX_S / MIN_S) / _LOG_GROWTH) + 1
_LAST = NUM_BUCKETS - 1
_INVERSE_LOG_GROWTH = 1 / _LOG_GROWTH
_LOG_MIN_S = math.log(MIN_S)


def bucket_of(duration_s: float) -> int:
    """Bucket 0 holds all up to MIN_S; bucket i holds (MIN_S * g**(i-1), MIN_S * g**i]."""
    if duration_s <= MIN_S:
        return 0
    return min(math.ceil((math.log(duration_s) - _LOG_MIN_S) * _INVERSE_LOG_GROWTH), _LAST)


def duration_of(bucket: int) -> float:
    """The duration in seconds that is at most RELATIVE_ERROR from everything in the bucket."""
    if bucket == 0:
        return MIN_S
    return MIN_S * _GROWTH**bucket * (1 - RELATIVE_ERROR)


def quantiles(counts: NDArray[np.float64], ranks: tuple[float, ...]) -> tuple[float, ...] | None:
    """Nearest-rank quantiles in seconds; None when nothing was counted.

    `counts`: shape (NUM_BUCKETS,). `ranks`: each in (0, 1]; 0.5 is the median.
    """
    cumulative = np.cumsum(counts)
    total = float(cumulative[-1])
    if total == 0:
        return None
    # The small deduction keeps 0.99 * 100 = 99.00000000000001 from asking for the 100th.
    wanted = [max(1, math.ceil(rank * total - 1e-9)) for rank in ranks]
    return tuple(duration_of(int(bucket)) for bucket in np.searchsorted(cumulative, wanted))

"""Windows and histograms against naive models that keep every entry."""

import math
from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.accounts.histogram import (
    MAX_S,
    MIN_S,
    NUM_BUCKETS,
    RELATIVE_ERROR,
    bucket_of,
    quantiles,
)
from gateway.accounts.windows import SLOT_TICKS, SLOTS, Window, Windows, first_tick

# Standing still, steps within a window, and silences longer than any window.
steps = st.one_of(st.just(0), st.integers(1, 3), st.integers(1, 700), st.integers(3000, 20_000))
additions = st.lists(
    st.tuples(steps, st.integers(0, 2), st.integers(1, 50), st.booleans()), max_size=60
)


@dataclass(frozen=True)
class Entry:
    tick: int
    column: int
    amount: int


def expected(entries: list[Entry], column: int, oldest: int) -> int:
    return sum(e.amount for e in entries if e.column == column and e.tick >= oldest)


@settings(deadline=None)
@given(additions, steps)
def test_windows_neither_lose_nor_double_count(
    plan: list[tuple[int, int, int, bool]], wait: int
) -> None:
    """Every window equals the sum over a list of all entries, also when read in between."""
    floats, counts = Windows(3), Windows(3, np.uint32)
    entries: list[Entry] = []
    now = 0
    for step, column, amount, read in plan:
        now += step
        entries.append(Entry(now, column, amount))
        floats.cells(now)[column] += amount
        counts.cells(now)[column] += amount
        if read:
            check(floats, entries, now)
    check(floats, entries, now + wait)
    check(counts, entries, now + wait)


def check(windows: Windows, entries: list[Entry], now: int) -> None:
    for window in Window:
        total = windows.total(window, now)
        oldest = first_tick(window, now)
        assert total.tolist() == [expected(entries, column, oldest) for column in range(3)]


@settings(deadline=None)
@given(st.integers(0, 10**7))
def test_window_edges_are_as_exact_as_stated(now: int) -> None:
    """A window covers at least its span and less than one slot more, once it ran that long."""
    for window, slot in SLOT_TICKS.items():
        covered = now - first_tick(window, now)
        span = SLOTS * slot
        assert covered == now or span <= covered < span + slot


@settings(deadline=None)
@given(
    st.lists(st.floats(MIN_S, MAX_S * 0.9), min_size=1, max_size=300),
    st.sampled_from([0.01, 0.5, 0.9, 0.99, 1.0]),
)
def test_quantiles_are_within_the_stated_error(durations_s: list[float], rank: float) -> None:
    """Compared with the value at the same rank of the sorted list."""
    counts = np.zeros(NUM_BUCKETS)
    for duration_s in durations_s:
        counts[bucket_of(duration_s)] += 1
    found = quantiles(counts, (rank,))
    assert found is not None
    exact = sorted(durations_s)[math.ceil(round(rank * len(durations_s), 9)) - 1]
    assert abs(found[0] - exact) <= exact * RELATIVE_ERROR * (1 + 1e-9)

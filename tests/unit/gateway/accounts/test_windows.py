"""Sliding windows at their edges."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.accounts.windows import SLOT_TICKS, Window, Windows, first_tick


def put(windows: Windows, tick: int, value: float = 1.0) -> None:
    windows.cells(tick)[0] += value


def sums(windows: Windows, tick: int) -> dict[str, float]:
    return {window.value: float(windows.total(window, tick)[0]) for window in Window}


def test_an_entry_is_in_every_window_at_once() -> None:
    """What was just added shows without waiting for its second to end."""
    windows = Windows(1)
    put(windows, 0, 2.5)
    assert sums(windows, 0) == {
        "since_start": 2.5,
        "last_1m": 2.5,
        "last_10m": 2.5,
        "last_1h": 2.5,
    }


@pytest.mark.parametrize(("window", "slot"), SLOT_TICKS.items())
def test_an_entry_leaves_between_the_span_and_one_slot_more(window: Window, slot: int) -> None:
    """60 slots after its own an entry is still there; one slot later it is gone."""
    windows = Windows(1)
    put(windows, 5 * slot)
    assert windows.total(window, 65 * slot + slot - 1)[0] == 1
    assert windows.total(window, 66 * slot)[0] == 0
    assert windows.total(Window.SINCE_START, 66 * slot)[0] == 1


def test_a_ring_that_turned_many_times_holds_only_the_newest() -> None:
    """After a silence of a day nothing old comes back."""
    windows = Windows(1)
    for tick in range(0, 300, 7):
        put(windows, tick)
    put(windows, 86_400)
    assert sums(windows, 86_400)["last_1h"] == 1
    assert sums(windows, 86_400)["since_start"] == 44


def test_a_clock_that_steps_back_loses_nothing() -> None:
    """A tick older than the newest counts as the newest."""
    windows = Windows(1)
    put(windows, 100)
    put(windows, 40)
    assert sums(windows, 90)["last_1m"] == 2


def test_reading_does_not_change_the_sums() -> None:
    """Two reads of the same tick agree, also with additions between reads."""
    windows = Windows(2, np.uint32)
    put(windows, 3)
    assert sums(windows, 3) == sums(windows, 3)
    put(windows, 3)
    assert sums(windows, 3)["last_1m"] == 2


def test_a_caller_cannot_change_the_sums_through_a_result() -> None:
    """Results are copies."""
    windows = Windows(1)
    put(windows, 0)
    for window in Window:
        windows.total(window, 0)[0] = 99
    assert set(sums(windows, 0).values()) == {1.0}


def test_windows_start_with_the_gateway() -> None:
    """Right after the start every window begins at tick 0."""
    assert {first_tick(window, 59) for window in Window} == {0}
    assert first_tick(Window.LAST_1M, 100) == 40
    assert first_tick(Window.LAST_10M, 1009) == 400


@given(
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 3), st.integers(0, 5)), max_size=60),
    st.integers(0, 4000),
)
def test_counts_that_are_summed_as_they_come_and_go_equal_those_summed_anew(
    entries: list[tuple[int, int, int]], wait: int
) -> None:
    """Whatever passed meanwhile, and also when the sums of another were taken over."""
    summed, counted, other = (Windows(4, dtype) for dtype in (np.float64, np.uint32, np.uint32))
    other_summed = Windows(4)
    tick = 0
    for later, column, count in entries:
        tick += later
        pair = (other, other_summed) if later % 2 else (counted, summed)
        for windows in pair:
            windows.cells(tick)[column] += count
    for window in Window:
        assert counted.total(window, tick).tolist() == summed.total(window, tick).tolist()
    counted.absorb(other, tick)
    summed.absorb(other_summed, tick)
    for window in Window:
        left, right = (each.total(window, tick + wait) for each in (counted, summed))
        assert left.tolist() == right.tolist()

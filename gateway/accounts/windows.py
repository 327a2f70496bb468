"""Sums over sliding windows of time, in memory that does not depend on traffic or uptime.

Time comes in ticks: whole seconds since start. A window of SPAN seconds is a ring of 60 full slots
and the slot that is being filled, so it covers at least its span and at most one slot more:

    window      slot     covers
    last_1m      1 s     60 s   to   61 s
    last_10m    10 s     10 min to   10 min 10 s
    last_1h     60 s     60 min to   61 min

An entry is in a window from its own tick on, and leaves it as a whole with its slot.
"""

from __future__ import annotations

import enum

import numpy as np
from numpy.typing import DTypeLike, NDArray

SLOTS = 60


class Window(enum.StrEnum):
    """The windows that are kept."""

    SINCE_START = "since_start"
    LAST_1M = "last_1m"
    LAST_10M = "last_10m"
    LAST_1H = "last_1h"


SLOT_TICKS = {Window.LAST_1M: 1, Window.LAST_10M: 10, Window.LAST_1H: 60}
"""Length of a slot of each sliding window, in ticks."""


def first_tick(window: Window, now: int) -> int:
    """The oldest tick that the window covers at tick `now`."""
    if window is Window.SINCE_START:
        return 0
    slot = SLOT_TICKS[window]
    return max(0, (now // slot - SLOTS) * slot)


class _Ring:
    """One sliding window: SLOTS + 1 rows of sums."""

    def __init__(self, width: int, slot_ticks: int, dtype: DTypeLike) -> None:
        self._rows = np.zeros((SLOTS + 1, width), dtype)
        self._slot_ticks = slot_ticks
        self._slot = 0
        # Many counts are summed as they come and go, which is exact. Amounts are few, and what
        # rounding leaves of them would add up, so they are summed anew each time.
        is_exact = np.issubdtype(self._rows.dtype, np.integer)
        self._total = np.zeros(width, np.float64) if is_exact else None

    def add(self, tick: int, cells: NDArray[np.float64]) -> None:
        self._advance(tick // self._slot_ticks)
        row = self._rows[self._slot % (SLOTS + 1)]
        np.add(row, cells, out=row, casting="unsafe")
        if self._total is not None:
            self._total += cells

    def total(self, tick: int) -> NDArray[np.float64]:
        self._advance(tick // self._slot_ticks)
        if self._total is not None:
            return self._total.copy()
        total: NDArray[np.float64] = self._rows.sum(axis=0, dtype=np.float64)
        return total

    def absorb(self, other: _Ring, tick: int) -> None:
        self._advance(tick // self._slot_ticks)
        other._advance(tick // self._slot_ticks)
        np.add(self._rows, other._rows, out=self._rows, casting="unsafe")
        if self._total is not None:
            self._total += other._rows.sum(axis=0, dtype=np.float64)

    def _advance(self, slot: int) -> None:
        # After a long silence each row is cleared once, not once for every slot that passed.
        for passed in range(self._slot + 1, min(slot, self._slot + SLOTS + 1) + 1):
            row = self._rows[passed % (SLOTS + 1)]
            if self._total is not None:
                self._total -= row
            row[:] = 0
        self._slot = max(self._slot, slot)


class Windows:
    """`width` sums in every window. `dtype` is that of the rings: float64 for amounts, uint32 for
    counts that stay below 4e9 in a minute. Since-start sums are float64: whole to 2**53."""

    def __init__(self, width: int, dtype: DTypeLike = np.float64) -> None:
        self._width = width
        self._tick = 0
        self._cells: list[float] = [0] * width
        self._dirty = False
        self._since_start = np.zeros(width, np.float64)
        self._rings = {
            window: _Ring(width, slot_ticks, dtype) for window, slot_ticks in SLOT_TICKS.items()
        }

    def cells(self, tick: int) -> list[float]:
        """The sums of this tick, to be added into at once and not kept. A tick before the newest
        one counts as the newest: time does not go backwards here."""
        if tick > self._tick:
            self._settle()
            self._tick = tick
        self._dirty = True
        return self._cells

    def total(self, window: Window, tick: int) -> NDArray[np.float64]:
        """Shape (width,): the sums of a window as it stands at `tick`."""
        self._settle()
        self._tick = max(self._tick, tick)
        if window is Window.SINCE_START:
            return self._since_start.copy()
        return self._rings[window].total(self._tick)

    def absorb(self, other: Windows, tick: int) -> None:
        """Take over all of another's sums, of the same width; it is not used any more."""
        self._settle()
        other._settle()
        self._tick = max(self._tick, other._tick, tick)
        self._since_start += other._since_start
        for window, ring in self._rings.items():
            ring.absorb(other._rings[window], self._tick)

    def _settle(self) -> None:
        """A Python list is several times faster to add into than an array, so the newest tick is
        collected in one and reaches the arrays once a second."""
        if not self._dirty:
            return
        settled = np.asarray(self._cells, np.float64)
        self._since_start += settled
        for ring in self._rings.values():
            ring.add(self._tick, settled)
        self._cells = [0] * self._width
        self._dirty = False

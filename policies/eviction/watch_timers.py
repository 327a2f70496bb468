"""When watched runs change their bucket of age."""

from __future__ import annotations

import heapq

from policies.eviction.request_runs import Watch

MIN_TIMERS = 1024
"""So many may be kept for runs of which nothing is left."""


class WatchTimers:
    """A heap of watches by the moment when they are due; one entry each."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Watch]] = []
        self._serial = 0
        self._limit = MIN_TIMERS

    def __len__(self) -> int:
        return len(self._heap)

    def set(self, watch: Watch) -> None:
        """Have it called at the end of its bucket; the oldest ages have none."""
        if watch.is_oldest:
            return
        watch.timed = True
        self._serial += 1
        heapq.heappush(self._heap, (watch.due_s, self._serial, watch))
        if len(self._heap) > self._limit:
            self._drop_idle()

    def due(self, now: float) -> Watch | None:
        """The next one whose moment has come; those of runs of which nothing is left just end."""
        while self._heap and self._heap[0][0] <= now:
            watch = heapq.heappop(self._heap)[2]
            watch.timed = False
            if watch.run.is_live:
                return watch
        return None

    def _drop_idle(self) -> None:
        kept: list[tuple[float, int, Watch]] = []
        for timer in self._heap:
            watch = timer[2]
            watch.timed = watch.run.is_live
            if watch.timed:
                kept.append(timer)
        heapq.heapify(kept)
        self._heap = kept
        self._limit = max(MIN_TIMERS, 2 * len(kept))

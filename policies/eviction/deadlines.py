"""Blocks with a point in time each, the earliest first."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic

from policies.eviction.base import B


@dataclass(frozen=True, slots=True)
class Deadline(Generic[B]):
    """One block and its time, on the clock of Access.time_s."""

    block: B
    time_s: float


class Deadlines(Generic[B]):
    """A heap with lazy deletion: at most half of its entries are stale."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int, Deadline[B]]] = []
        self._live: dict[B, Deadline[B]] = {}
        self._serial = 0

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, block: B) -> bool:
        return block in self._live

    def __iter__(self) -> Iterator[Deadline[B]]:
        return iter(self._live.values())

    def set(self, block: B, time_s: float) -> None:
        """Give a block its time, or another one."""
        deadline = Deadline(block, time_s)
        self._live[block] = deadline
        self._serial += 1
        heapq.heappush(self._heap, (time_s, -block.depth, self._serial, deadline))
        self._compact()

    def get(self, block: B) -> float | None:
        deadline = self._live.get(block)
        return None if deadline is None else deadline.time_s

    def drop(self, block: B) -> bool:
        """False when the block has no deadline."""
        if self._live.pop(block, None) is None:
            return False
        self._compact()
        return True

    def due(self, now: float) -> B | None:
        """The block whose time came first, the deepest of equals, or None when none has come."""
        while self._heap and self._heap[0][0] <= now:
            deadline = self._heap[0][3]
            if self._live.get(deadline.block) is deadline:
                return deadline.block
            heapq.heappop(self._heap)
        return None

    def _compact(self) -> None:
        if len(self._heap) > 2 * len(self._live) + 64:
            self._heap = [e for e in self._heap if self._live.get(e[3].block) is e[3]]
            heapq.heapify(self._heap)

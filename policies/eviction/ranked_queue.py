"""The common ground of policies whose rank changes only when a block is used."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic

from policies.eviction.base import B

Rank = tuple[float, ...]


class RankedQueue(ABC, Generic[B]):
    """A heap of (rank, block), lowest first, with lazy deletion: at most half of its entries are
    stale. Subclasses define `rank` and may overload what else they want to see."""

    def __init__(self) -> None:
        self._heap: list[tuple[Rank, int, B]] = []
        self._live: dict[B, int] = {}
        self._serial = 0

    @abstractmethod
    def rank(self, block: B) -> Rank:
        """Its place in the order now."""

    def insert(self, block: B) -> None:
        return

    def use(self, blocks: Sequence[B]) -> None:
        return

    def add(self, block: B) -> None:
        self._serial += 1
        self._live[block] = self._serial
        heapq.heappush(self._heap, (self.rank(block), self._serial, block))
        self._compact()

    def discard(self, block: B) -> None:
        if self._live.pop(block, None) is not None:
            self._compact()

    def pop(self, now: float) -> B | None:
        del now
        while self._heap:
            _, serial, block = heapq.heappop(self._heap)
            if self._live.get(block) == serial:
                del self._live[block]
                return block
        return None

    def remove(self, block: B) -> None:
        self.discard(block)

    def admits(self, block: B, now: float) -> bool:
        del block, now
        return True

    def __len__(self) -> int:
        return len(self._live)

    def _compact(self) -> None:
        if len(self._heap) > 2 * len(self._live) + 64:
            self._heap = [e for e in self._heap if self._live.get(e[2]) == e[1]]
            heapq.heapify(self._heap)

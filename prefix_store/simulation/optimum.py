"""The optimum: the block whose next use is farthest away goes first (Belady, 1966).

A child's next use is never before its parent's, so the farthest is always found among the leaves
and tail-first costs nothing. A newcomer that is needed later than every candidate is not let in;
with `refuses=False` it is, as plain eviction policies have to. Optimal in hits of blocks of one
size, not in prefill time, which grows with depth.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from policies.eviction import Block, EvictionQueue

NextUse = Callable[[bytes], float]


@dataclass(frozen=True, slots=True)
class Optimum:
    """`next_use`: when a block is asked for next, after the present moment."""

    next_use: NextUse
    refuses: bool = True

    def queue(self) -> EvictionQueue[Any]:
        return _OptimumQueue(self.next_use, self.refuses)


class _OptimumQueue:
    def __init__(self, next_use: NextUse, refuses: bool) -> None:
        self._next_use = next_use
        self._refuses = refuses
        self._heap: list[tuple[float, int, int, Block]] = []
        self._live: dict[Block, int] = {}
        self._serial = 0

    def insert(self, block: Block) -> None:
        return

    def use(self, blocks: Sequence[Block]) -> None:
        return

    def add(self, block: Block) -> None:
        self._serial += 1
        self._live[block] = self._serial
        entry = (-self._next_use(block.hash), -block.depth, self._serial, block)
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._live) + 64:
            self._heap = [each for each in self._heap if self._is_live(each)]
            heapq.heapify(self._heap)

    def discard(self, block: Block) -> None:
        self._live.pop(block, None)

    def pop(self, now: float) -> Block | None:
        del now
        self._skip_stale()
        if not self._heap:
            return None
        block = heapq.heappop(self._heap)[3]
        del self._live[block]
        return block

    def remove(self, block: Block) -> None:
        self.discard(block)

    def admits(self, block: Block, now: float) -> bool:
        del now
        if not self._refuses:
            return True
        self._skip_stale()
        return not self._heap or self._next_use(block.hash) < -self._heap[0][0]

    def __len__(self) -> int:
        return len(self._live)

    def _is_live(self, entry: tuple[float, int, int, Block]) -> bool:
        return self._live.get(entry[3]) == entry[2]

    def _skip_stale(self) -> None:
        while self._heap and not self._is_live(self._heap[0]):
            heapq.heappop(self._heap)

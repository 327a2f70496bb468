"""Adaptive replacement cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from policies.base import Settings
from policies.eviction.base import B, EvictionQueue
from policies.eviction.ghost_list import GhostList
from policies.eviction.lru import LruQueue


@dataclass(slots=True)
class Seat:
    """Where a block is."""

    frequent: bool
    """In T2: used more than once. Otherwise in T1."""
    popped: bool = False
    """If it leaves now, it was evicted."""


class ArcQueue(EvictionQueue[B]):
    """T1 and T2 with their ghosts B1 and B2 and the target size of T1, in the paper's names. The
    paper's cache is as large as the tier is now: all its blocks, candidates or not."""

    def __init__(self) -> None:
        self._t1, self._t2 = LruQueue[B](), LruQueue[B]()
        """Candidates only; the other blocks of T1 and T2 are counted."""
        self._t1_size = self._t2_size = 0
        self._b1, self._b2 = GhostList(), GhostList()
        self._target = 0.0

    def insert(self, block: B) -> None:
        block_hash = block.hash
        size = self._t1_size + self._t2_size + 1
        if block_hash in self._b1:
            step = max(1.0, len(self._b2) / len(self._b1))
            self._target = min(float(size), self._target + step)
            self._b1.discard(block_hash)
            block.mark = Seat(frequent=True)
        elif block_hash in self._b2:
            step = max(1.0, len(self._b1) / len(self._b2))
            self._target = max(0.0, self._target - step)
            self._b2.discard(block_hash)
            block.mark = Seat(frequent=True)
        else:
            block.mark = Seat(frequent=False)
        self._count(block.mark, 1)

    def use(self, blocks: Sequence[B]) -> None:
        for block in blocks:
            if block.mark is not None and block.mark.frequent:
                continue
            seat = self._seat(block)
            if not seat.frequent:  # not one that was new here and came from a ghost
                self._t1.discard(block)
                self._count(seat, -1)
                seat.frequent = True
                self._count(seat, 1)

    def add(self, block: B) -> None:
        seat = self._seat(block)
        seat.popped = False
        (self._t2 if seat.frequent else self._t1).add(block)

    def discard(self, block: B) -> None:
        self._t1.discard(block)
        self._t2.discard(block)

    def pop(self, now: float) -> B | None:
        first, second = self._t2, self._t1
        if self._t1_size > self._target:
            first, second = second, first
        victim = first.pop(now)
        if victim is None:
            victim = second.pop(now)
        if victim is not None:
            victim.mark.popped = True
        return victim

    def remove(self, block: B) -> None:
        self.discard(block)
        seat: Seat | None = block.mark
        if seat is None:
            return
        block.mark = None
        self._count(seat, -1)
        if seat.popped:
            (self._b2 if seat.frequent else self._b1).add(block.hash)
        self._b1.trim(self._t2_size)
        self._b2.trim(self._t1_size + self._t2_size - len(self._b1))

    def admits(self, block: B, now: float) -> bool:
        del block, now
        return True

    def __len__(self) -> int:
        return len(self._t1) + len(self._t2)

    def _seat(self, block: B) -> Seat:
        if block.mark is None:
            self.insert(block)
        seat: Seat = block.mark
        return seat

    def _count(self, seat: Seat, change: int) -> None:
        if seat.frequent:
            self._t2_size += change
        else:
            self._t1_size += change


class ArcEviction(Settings):
    """Adaptive replacement cache (ARC): balances recency against frequency by the blocks that come
    back after it let them go. Source: N. Megiddo, D. Modha, "ARC: a self-tuning, low overhead
    replacement cache", FAST 2003. Differs from it where a prefix tree demands: only leaves go, so
    the other list is taken when the chosen one has none, and a victim is chosen before it is known
    what it makes room for, so a tie between T1 and its target is always decided for T2."""

    kind: Literal["arc"] = "arc"

    def queue(self) -> EvictionQueue[Any]:
        return ArcQueue[Any]()

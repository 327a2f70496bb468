"""Which block goes first when a tier is full.

The tier decides WHO may go: tail first (only blocks without children in the tier), never a leased
block, never one that is being written. A policy only orders those candidates.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Annotated, Generic, Literal, Protocol, TypeVar

from pydantic import Field

from policies.base import Settings

K = TypeVar("K", bound=Hashable)


class EvictionQueue(Protocol[K]):
    """The candidates of one tier in the order in which they would go. O(log n) per operation."""

    def add(self, key: K, *, inserted: int, last_used: int, depth: int) -> None:
        """`key` may go from now on. `inserted`, `last_used`: the tier's logical clock; `depth`:
        blocks before it in its prompt."""

    def discard(self, key: K) -> None:
        """`key` may not go any more (leased, got a child) or is gone. Unknown keys are ignored."""

    def pop(self) -> K | None:
        """Take the next victim out; None when there is no candidate."""

    def __len__(self) -> int: ...


class _RankedQueue(Generic[K]):
    """A heap of (rank, key) with lazy deletion; at most half of its entries are stale."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], int, K]] = []
        self._live: dict[K, int] = {}
        self._serial = 0

    def push(self, key: K, rank: tuple[int, int]) -> None:
        self._serial += 1
        self._live[key] = self._serial
        heapq.heappush(self._heap, (rank, self._serial, key))
        self._compact()

    def discard(self, key: K) -> None:
        if self._live.pop(key, None) is not None:
            self._compact()

    def _compact(self) -> None:
        if len(self._heap) > 2 * len(self._live) + 64:
            self._heap = [e for e in self._heap if self._live.get(e[2]) == e[1]]
            heapq.heapify(self._heap)

    def pop(self) -> K | None:
        while self._heap:
            _, serial, key = heapq.heappop(self._heap)
            if self._live.get(key) == serial:
                del self._live[key]
                return key
        return None

    def __len__(self) -> int:
        return len(self._live)


class _LruQueue(_RankedQueue[K]):
    def add(self, key: K, *, inserted: int, last_used: int, depth: int) -> None:
        del inserted
        self.push(key, (last_used, -depth))


class _FifoQueue(_RankedQueue[K]):
    def add(self, key: K, *, inserted: int, last_used: int, depth: int) -> None:
        del last_used
        self.push(key, (inserted, -depth))


class LruEviction(Settings):
    """Least recently used; among equals the deepest block of a prompt first."""

    kind: Literal["lru"] = "lru"

    def queue(self) -> EvictionQueue[bytes]:
        return _LruQueue[bytes]()


class FifoEviction(Settings):
    """First in, first out; reuse does not matter."""

    kind: Literal["fifo"] = "fifo"

    def queue(self) -> EvictionQueue[bytes]:
        return _FifoQueue[bytes]()


Eviction = Annotated[LruEviction | FifoEviction, Field(discriminator="kind")]
"""Add a policy: one class with a `kind` and a `queue()`, its name here, one test."""

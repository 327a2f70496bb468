"""Tickets of one tenant that wait: which is its next, which its last. No I/O."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

from gateway.fleet.ticket import Ticket

T = TypeVar("T")

_SLACK = 16
"""So many tickets that are gone may lie in a heap beside as many as wait."""


class Queued(Generic[T]):
    """A ticket in a queue, with whatever belongs to it."""

    __slots__ = ("item", "order", "ticket", "waits")

    def __init__(self, ticket: Ticket, item: T) -> None:
        self.ticket = ticket
        self.item = item
        self.order = 0
        """Of arrival. Given by the queue."""
        self.waits = False
        """It is in the queue."""


class TenantLine(Generic[T]):
    """Ordered by priority, then by arrival. Every operation is O(log n), amortised: what leaves
    from the middle lies in the heaps until it comes up, or until half of them is of that kind."""

    __slots__ = ("_count", "_first", "_last")

    def __init__(self) -> None:
        self._count = 0
        self._first: list[tuple[int, int, Queued[T]]] = []
        self._last: list[tuple[int, int, Queued[T]]] = []

    def __len__(self) -> int:
        return self._count

    def add(self, queued: Queued[T]) -> None:
        """At its place by priority; behind its equals."""
        priority, order = queued.ticket.priority, queued.order
        heappush(self._first, (priority, order, queued))
        heappush(self._last, (-priority, -order, queued))
        queued.waits = True
        self._count += 1

    def first(self) -> Queued[T] | None:
        """The next to be served."""
        return _top(self._first)

    def last(self) -> Queued[T] | None:
        """The one that can be spared most easily."""
        return _top(self._last)

    def remove(self, queued: Queued[T]) -> None:
        """`queued` waits in this line."""
        queued.waits = False
        self._count -= 1
        self._first = _tidied(self._first, self._count)
        self._last = _tidied(self._last, self._count)


def _top(heap: list[tuple[int, int, Queued[T]]]) -> Queued[T] | None:
    while heap:
        queued = heap[0][2]
        if queued.waits:
            return queued
        heappop(heap)
    return None


def _tidied(heap: list[tuple[int, int, Queued[T]]], count: int) -> list[tuple[int, int, Queued[T]]]:
    if len(heap) <= 2 * count + _SLACK:
        return heap
    heap = [entry for entry in heap if entry[2].waits]
    heapify(heap)
    return heap

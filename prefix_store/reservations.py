"""Places in the arena that somebody writes to: not visible, and not free."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from prefix_store.base import BlockHash
from prefix_store.extents import Extent
from prefix_store.index import Node

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Place:
    """A reserved place. Tickets are never used again, offsets are."""

    ticket: int
    extent: Extent


@dataclass(slots=True)
class Reservation(Generic[V]):
    """Who writes which block where, and until when."""

    writer: int
    block_hash: BlockHash
    parent: BlockHash | None
    extent: Extent
    expires: float
    held_parent: Node[V] | None
    """Leased, so that it does not go to make room for its own child."""


class Reservations(Generic[V]):
    """By ticket; a block is reserved at most once. Bounded by the room that they take."""

    def __init__(self) -> None:
        self._by_ticket: dict[int, Reservation[V]] = {}
        self._hashes: set[BlockHash] = set()
        self._tickets = itertools.count(1)
        self.num_bytes = 0

    def __contains__(self, block_hash: BlockHash) -> bool:
        """Whether somebody writes this block."""
        return block_hash in self._hashes

    def __iter__(self) -> Iterator[Reservation[V]]:
        return iter(self._by_ticket.values())

    def add(self, reservation: Reservation[V]) -> Place:
        """Take a place that the caller has allocated."""
        ticket = next(self._tickets)
        self._by_ticket[ticket] = reservation
        self._hashes.add(reservation.block_hash)
        self.num_bytes += reservation.extent.num_bytes
        return Place(ticket, reservation.extent)

    def end(self, ticket: int) -> Reservation[V] | None:
        """Its place is the caller's again; None for a ticket that has ended before."""
        reservation = self._by_ticket.pop(ticket, None)
        if reservation is not None:
            self._hashes.discard(reservation.block_hash)
            self.num_bytes -= reservation.extent.num_bytes
        return reservation

    def late(self, now: float) -> list[int]:
        """Tickets whose time is over."""
        return [ticket for ticket, each in self._by_ticket.items() if each.expires <= now]

"""Bounded concurrency: so many requests are inside, so many wait for a place, the rest is refused.

Used for the gateway as a whole and for every replica.
"""

from __future__ import annotations

import asyncio
import enum
from dataclasses import dataclass

from gateway.fleet.fair_queue import FairQueue
from gateway.fleet.tenant_line import Queued
from gateway.fleet.ticket import Ticket
from gateway.fleet.turnover import Turnover
from gateway.web.errors import (
    DeadlineError,
    GatewayError,
    TooManyRequestsError,
    UnavailableError,
)


@dataclass(frozen=True, slots=True)
class LimitKeys:
    """The configuration's keys that an operator changes for more places."""

    running: str
    waiting: str
    wait: str = "limits.max_wait"


GATEWAY_KEYS = LimitKeys("limits.max_concurrent_requests", "limits.max_waiting_requests")
REPLICA_KEYS = LimitKeys("engines[].max_running", "engines[].max_waiting")


class PlaceLostError(UnavailableError):
    """Who waited here has to go elsewhere: nobody gets a place for now."""


class _Fate(enum.Enum):
    """What becomes of somebody who waits."""

    PLACE = enum.auto()
    GAVE_WAY = enum.auto()
    EVICTED = enum.auto()
    WAITED_TOO_LONG = enum.auto()
    DEADLINE = enum.auto()


_Waiter = asyncio.Future[_Fate]


class Places:
    """`async with places.place(ticket)`. Who waits is served as FairQueue says; a waiter that is
    cancelled leaves no trace.

    While a place is free nobody waits: every method leaves it so.
    """

    def __init__(
        self,
        limit: int,
        max_waiting: int,
        max_wait_s: float,
        *,
        name: str = "the gateway",
        keys: LimitKeys = GATEWAY_KEYS,
    ) -> None:
        """`name` and `keys` stand in the errors."""
        self._limit = limit
        self._max_wait_s = max_wait_s
        self._name = name
        self._keys = keys
        self._running = 0
        self._queue: FairQueue[_Waiter] = FairQueue(max_waiting)
        self._turnover = Turnover()

    @property
    def limit(self) -> int:
        """Places that there are now."""
        return self._limit

    @property
    def running(self) -> int:
        """Requests that have a place; more than the limit for a while after it was lowered."""
        return self._running

    @property
    def waiting(self) -> int:
        """Requests that wait for one."""
        return len(self._queue)

    def place(self, ticket: Ticket) -> Place:
        """A place for the length of an `async with` block. Raises what `enter` raises."""
        return Place(self, ticket)

    async def enter(self, ticket: Ticket) -> None:
        """Take a place, to be given back with `leave`.

        Raises TooManyRequestsError when nobody more may wait, or when this one has to give way to
        another tenant's; UnavailableError after max_wait_s; DeadlineError at the ticket's
        deadline; PlaceLostError when all who wait are sent away.
        """
        now = asyncio.get_running_loop().time()
        if ticket.expired(now):
            raise self._error(_Fate.DEADLINE)
        if self._running < self._limit:
            self._queue.pass_by(ticket)
            self._running += 1
            return
        self._turnover.full(now)
        fate = await self._wait(ticket, now)
        if fate is not _Fate.PLACE:
            raise self._error(fate)

    def leave(self) -> None:
        """Give a place back: it goes to the next who waits."""
        if not self._running:
            raise RuntimeError(f"more have left {self._name} than entered")
        self._running -= 1
        self._turnover.freed(asyncio.get_running_loop().time())
        self._hand_out()

    def set_limit(self, limit: int) -> None:
        """More places are handed out at once. Of fewer, those that are taken are held until they
        are given back; 0 lets nobody in."""
        self._limit = limit
        self._hand_out()

    def evict_waiting(self) -> int:
        """Send all who wait elsewhere, by PlaceLostError. Returns how many."""
        gone = self._queue.clear()
        for queued in gone:
            _decide(queued, _Fate.EVICTED)
        return len(gone)

    async def _wait(self, ticket: Ticket, now: float) -> _Fate:
        loop = asyncio.get_running_loop()
        queued: Queued[_Waiter] = Queued(ticket, loop.create_future())
        pushed_out = self._queue.push(queued)
        if pushed_out is queued:
            raise self._full()
        if pushed_out is not None:
            _decide(pushed_out, _Fate.GAVE_WAY)
        until, end = now + self._max_wait_s, _Fate.WAITED_TOO_LONG
        if ticket.deadline is not None and ticket.deadline <= until:
            until, end = ticket.deadline, _Fate.DEADLINE
        timer = loop.call_at(until, self._give_up, queued, end)
        try:
            return await queued.item
        except asyncio.CancelledError:
            self._cancelled(queued)
            raise
        finally:
            timer.cancel()

    def _give_up(self, queued: Queued[_Waiter], fate: _Fate) -> None:
        """Its time is over, unless it was decided on already."""
        self._queue.remove(queued)
        _decide(queued, fate)

    def _cancelled(self, queued: Queued[_Waiter]) -> None:
        """A place that it was handed at the same moment goes to the next."""
        self._queue.remove(queued)
        if not queued.item.cancelled() and queued.item.result() is _Fate.PLACE:
            self.leave()

    def _hand_out(self) -> None:
        now = asyncio.get_running_loop().time()
        while self._running < self._limit:
            queued = self._queue.first(now)
            if queued is None:
                self._turnover.idle()
                if not self._running:
                    self._queue.rest()
                return
            if queued.item.done():  # cancelled, but it has not run since
                self._queue.remove(queued)
                continue
            self._queue.pop(now)
            self._running += 1
            queued.item.set_result(_Fate.PLACE)

    def _error(self, fate: _Fate) -> GatewayError:
        keys, retry_after_s = self._keys, self._retry_after_s()
        if fate is _Fate.GAVE_WAY:
            return TooManyRequestsError(
                f"{self._name} is full, and this request gave way to one of a tenant with fewer "
                f"requests, or to a more urgent one ({keys.running}, {keys.waiting})",
                retry_after_s=retry_after_s,
            )
        if fate is _Fate.EVICTED:
            return PlaceLostError(f"{self._name} takes no requests now", retry_after_s=1)
        if fate is _Fate.DEADLINE:
            return DeadlineError(
                f"the request's deadline passed before {self._name} had a place for it "
                f"({keys.running})"
            )
        return UnavailableError(
            f"{self._name} had no free place within {self._max_wait_s:g} s "
            f"({keys.wait}, {keys.running})",
            retry_after_s=retry_after_s,
        )

    def _full(self) -> TooManyRequestsError:
        return TooManyRequestsError(
            f"{self._name} is full: {self._running} requests are running and "
            f"{len(self._queue)} are waiting ({self._keys.running}, {self._keys.waiting})",
            retry_after_s=self._retry_after_s(),
        )

    def _retry_after_s(self) -> int:
        now = asyncio.get_running_loop().time()
        return self._turnover.retry_after_s(len(self._queue), now)


class Place:
    """One place among Places, asked for with a ticket."""

    __slots__ = ("_places", "_ticket")

    def __init__(self, places: Places, ticket: Ticket) -> None:
        self._places = places
        self._ticket = ticket

    async def __aenter__(self) -> None:
        await self._places.enter(self._ticket)

    async def __aexit__(self, *_: object) -> None:
        self._places.leave()


def _decide(queued: Queued[_Waiter], fate: _Fate) -> None:
    if not queued.item.done():
        queued.item.set_result(fate)

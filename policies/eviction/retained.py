"""Retention on top of any eviction: pins stay, expired blocks go first, then by priority."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic

from policies.access import DEFAULT_PRIORITY, PLAIN, Access, Retention
from policies.eviction.base import B, EvictionQueue
from policies.eviction.deadlines import Deadline, Deadlines
from policies.eviction.lets_all_in import Kind, LetsAllIn


@dataclass(slots=True)
class _Place:
    """Where a block is of which more is known than nothing."""

    judged: Retention
    """What its place follows from."""
    priority: int = DEFAULT_PRIORITY
    """Of the queue that it is in."""
    candidate: bool = False
    pinned_by: Access | None = None
    """Whose request asked for its pin last."""


class RetainedQueue(Generic[B]):
    """One queue of the kind per priority, and the blocks' deadlines. Blocks without retention
    rules cost one look at their access.

    The last request that used a block says its ttl and its priority. A pin outlives later requests
    without one: it holds until its own time is over or `unpin`. A block that moves to another
    priority is new to the kind there."""

    def __init__(self, kind: Kind, pin_budget_bytes: int) -> None:
        self._kind = kind
        self._plain: EvictionQueue[B] = kind.queue()
        self._queues: dict[int, EvictionQueue[B]] = {DEFAULT_PRIORITY: self._plain}
        self._order = [DEFAULT_PRIORITY]
        self._places: dict[B, _Place] = {}
        self._expiry = Deadlines[B]()
        """Of candidates that have a ttl."""
        self._pins = Deadlines[B]()
        self.pin_budget_bytes = pin_budget_bytes
        self.pinned_bytes = 0
        self.pins_refused = 0
        """Blocks whose pin was over the budget, each time that it was asked for."""

    def insert(self, block: B) -> None:
        if block.access.retention is PLAIN:
            self._plain.insert(block)
            return
        priority = block.access.retention.priority
        self._queue(priority).insert(block)
        self._places[block] = _Place(PLAIN, priority)
        self._judge(block)

    def use(self, blocks: Sequence[B]) -> None:
        if not blocks:
            return
        retention = blocks[0].access.retention
        if self._places or retention is not PLAIN:
            for block in blocks:
                self._judge(block)
        self._queue(retention.priority).use(blocks)

    def add(self, block: B) -> None:
        retention = block.access.retention
        place = self._places.get(block)
        if retention is not (PLAIN if place is None else place.judged):
            self._judge(block)
            place = self._places.get(block)
        if place is None:
            self._plain.add(block)
            return
        place.candidate = True
        if block not in self._pins:
            self._offer(block, place)

    def discard(self, block: B) -> None:
        place = self._places.get(block)
        if place is None:
            self._plain.discard(block)
            return
        place.candidate = False
        self._withhold(block, place)

    def pop(self, now: float) -> B | None:
        if self._places:
            self._expire_pins(now)
            block = self._expiry.due(now)
            if block is not None:
                self.discard(block)
                return block
        for priority in self._order:
            block = self._queues[priority].pop(now)
            if block is not None:
                if self._places:
                    self.discard(block)
                return block
        return None

    def remove(self, block: B) -> None:
        place = self._places.pop(block, None)
        if place is None:
            self._plain.remove(block)
            return
        self._expiry.drop(block)
        self._release(block)
        self._queues[place.priority].remove(block)

    def admits(self, block: B, now: float) -> bool:
        """A block that would be the next to go itself is not worth anybody's room."""
        retention = block.access.retention
        if self._places:
            self._expire_pins(now)
            if self._expiry.due(now) is not None:
                return True
        if retention.pin and self._has_room(block):
            return True
        for priority in self._order:
            queue = self._queues[priority]
            if len(queue):
                if priority == retention.priority:
                    return queue.admits(block, now)
                return priority < retention.priority
        return True

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def pin(self, block: B, until_s: float) -> bool:
        """Keep a block of the tier until then; a longer pin that it has stays. False when the
        budget is used up."""
        held = self._pins.get(block)
        if held is None:
            if not self._has_room(block):
                self.pins_refused += 1
                return False
            self.pinned_bytes += block.num_bytes
        self._pins.set(block, until_s if held is None else max(held, until_s))
        place = self._places.get(block)
        if place is None:
            # Whether it is a candidate was the plain queue's to know: its length tells.
            candidates = len(self._plain)
            self._plain.discard(block)
            place = _Place(block.access.retention, candidate=len(self._plain) < candidates)
            self._places[block] = place
        else:
            self._withhold(block, place)
        return True

    def unpin(self, block: B) -> bool:
        """False when the block is not pinned."""
        if not self._release(block):
            return False
        self._settle(block)
        return True

    def pinned(self, now: float) -> list[Deadline[B]]:
        """Blocks with pins and when they end; those that have ended are gone."""
        self._expire_pins(now)
        return list(self._pins)

    def pinned_by(self, block: B) -> Access | None:
        """The request that asked for a block's pin last; others may have used it since."""
        place = self._places.get(block)
        return None if place is None else place.pinned_by

    def take_pins(self, former: RetainedQueue[B], now: float) -> None:
        """Have the pins that `former` has for blocks that are here too, as far as the budget
        goes, and no others: what was revoked there stays revoked."""
        for pin in self.pinned(now):
            self.unpin(pin.block)
        for pin in former.pinned(now):
            by = former.pinned_by(pin.block)
            if self.pin(pin.block, pin.time_s) and by is not None:
                self._places[pin.block].pinned_by = by

    def _judge(self, block: B) -> None:
        """Put a block where its last use says."""
        access = block.access
        retention = access.retention
        place = self._places.get(block)
        if place is None:
            if retention is PLAIN:
                return
            place = self._places[block] = _Place(retention)
        place.judged = retention
        if place.priority != retention.priority:
            self._queues[place.priority].remove(block)
            block.mark = None
            place.priority = retention.priority
            self._queue(place.priority).insert(block)
        if retention.pin:
            self._expire_pins(access.time_s)
            ttl_s = math.inf if retention.ttl_s is None else retention.ttl_s
            if self.pin(block, access.time_s + ttl_s):
                place.pinned_by = access
        self._forget_if_plain(block, place)

    def _settle(self, block: B) -> None:
        """The block's pin is over."""
        place = self._places[block]
        if place.candidate:
            self._offer(block, place)
        self._forget_if_plain(block, place)

    def _offer(self, block: B, place: _Place) -> None:
        self._queues[place.priority].add(block)
        ttl_s = block.access.retention.ttl_s
        if ttl_s is not None:
            self._expiry.set(block, block.access.time_s + ttl_s)
        else:
            self._expiry.drop(block)

    def _withhold(self, block: B, place: _Place) -> None:
        self._queues[place.priority].discard(block)
        self._expiry.drop(block)

    def _forget_if_plain(self, block: B, place: _Place) -> None:
        if place.judged is PLAIN and block not in self._pins:
            self._expiry.drop(block)
            del self._places[block]

    def _expire_pins(self, now: float) -> None:
        while (block := self._pins.due(now)) is not None:
            self._release(block)
            self._settle(block)

    def _release(self, block: B) -> bool:
        if not self._pins.drop(block):
            return False
        self.pinned_bytes -= block.num_bytes
        return True

    def _has_room(self, block: B) -> bool:
        return self.pinned_bytes + block.num_bytes <= self.pin_budget_bytes

    def _queue(self, priority: int) -> EvictionQueue[B]:
        queue = self._queues.get(priority)
        if queue is None:
            queue = self._queues[priority] = self._kind.queue()
            bisect.insort(self._order, priority)
        return queue


@dataclass(frozen=True, slots=True)
class Retained:
    """Any kind of eviction, with retention rules on top."""

    eviction: Kind
    pin_budget_bytes: int = 0

    def queue(self) -> RetainedQueue[Any]:
        return RetainedQueue[Any](self.eviction, self.pin_budget_bytes)


def let_all_in(eviction: Kind) -> Kind:
    """The same eviction for a tier above others: only retention may keep a block out."""
    if isinstance(eviction, Retained):
        return replace(eviction, eviction=LetsAllIn(eviction.eviction))
    return LetsAllIn(eviction)

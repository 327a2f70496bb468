"""The pins of one tier: listed, and revoked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from policies.access import NO_ACCESS, Access
from policies.eviction.retained import RetainedQueue
from prefix_store.index import Eviction, Node, RadixIndex

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class PinOwner:
    """Whose request pinned blocks."""

    tenant: str
    session: str
    prefix: str

    def matches(self, owner: PinOwner) -> bool:
        """Whether `owner` is one of those meant; texts that are empty match any."""
        return (
            self.tenant in ("", owner.tenant)
            and self.session in ("", owner.session)
            and self.prefix in ("", owner.prefix)
        )


ANYBODY = PinOwner("", "", "")
"""Matches every owner."""


@dataclass(frozen=True, slots=True)
class PinGroup:
    """Pinned blocks of one owner in one tier."""

    tier: str
    owner: PinOwner
    num_blocks: int
    num_bytes: int
    ends_s: float
    """When the last of them ends, on the store's clock."""


class Pins(Generic[V]):
    """A view; it holds nothing itself."""

    def __init__(self, tier: str, index: RadixIndex[V]) -> None:
        self._tier = tier
        self._queue = index.queue if isinstance(index.queue, RetainedQueue) else None

    def groups(self, now: float) -> list[PinGroup]:
        """By owner, the largest first."""
        groups: dict[PinOwner, PinGroup] = {}
        for pin in self._pinned(now):
            owner = pin.owner
            so_far = groups.get(owner, PinGroup(self._tier, owner, 0, 0, 0.0))
            num_bytes = so_far.num_bytes + pin.block.num_bytes
            ends_s = max(so_far.ends_s, pin.ends_s)
            groups[owner] = PinGroup(self._tier, owner, so_far.num_blocks + 1, num_bytes, ends_s)
        return sorted(groups.values(), key=lambda group: -group.num_bytes)

    def revoke(self, owner: PinOwner, now: float) -> int:
        """Unpin the blocks of an owner; texts that are empty match any. Returns how many."""
        queue = self._queue
        if queue is None:
            return 0
        wanted = [pin.block for pin in self._pinned(now) if owner.matches(pin.owner)]
        return sum(queue.unpin(block) for block in wanted)

    def _pinned(self, now: float) -> list[_Pin[V]]:
        queue = self._queue
        if queue is None:
            return []
        return [
            _Pin(each.block, _owner_of(queue.pinned_by(each.block)), each.time_s)
            for each in queue.pinned(now)
        ]


@dataclass(frozen=True, slots=True)
class _Pin(Generic[V]):
    block: Node[V]
    owner: PinOwner
    ends_s: float


def order_by(index: RadixIndex[V], eviction: Eviction, now: float) -> None:
    """Give an index another eviction policy that keeps the pins, as far as its budget goes."""
    former = index.queue
    index.order_by(eviction)
    if isinstance(former, RetainedQueue) and isinstance(index.queue, RetainedQueue):
        index.queue.take_pins(former, now)


def _owner_of(access: Access | None) -> PinOwner:
    access = NO_ACCESS if access is None else access
    return PinOwner(access.tenant, access.session, access.prefix)

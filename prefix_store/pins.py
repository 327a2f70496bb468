"""The pins of one tier: listed, and revoked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from policies.eviction.retained import RetainedQueue
from prefix_store.index import Node, RadixIndex

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class PinOwner:
    """Whose request pinned blocks."""

    tenant: str
    session: str
    prefix: str


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
        self._queue = index.queue

    def groups(self, now: float) -> list[PinGroup]:
        """By owner, the largest first."""
        groups: dict[PinOwner, PinGroup] = {}
        for pin in self._pinned(now):
            owner = _owner_of(pin.block)
            so_far = groups.get(owner, PinGroup(self._tier, owner, 0, 0, 0.0))
            groups[owner] = PinGroup(
                self._tier,
                owner,
                so_far.num_blocks + 1,
                so_far.num_bytes + pin.block.num_bytes,
                max(so_far.ends_s, pin.at_s),
            )
        return sorted(groups.values(), key=lambda group: -group.num_bytes)

    def revoke(self, owner: PinOwner, now: float) -> int:
        """Unpin the blocks of an owner; texts that are empty match any. Returns how many."""
        queue = self._queue
        if not isinstance(queue, RetainedQueue):
            return 0
        wanted = [pin.block for pin in self._pinned(now) if _matches(owner, _owner_of(pin.block))]
        return sum(queue.unpin(block) for block in wanted)

    def _pinned(self, now: float) -> list[_Pin[V]]:
        queue = self._queue
        if not isinstance(queue, RetainedQueue):
            return []
        return [_Pin(each.block, each.time_s) for each in queue.pinned(now)]


@dataclass(frozen=True, slots=True)
class _Pin(Generic[V]):
    block: Node[V]
    at_s: float


def _owner_of(block: Node[V]) -> PinOwner:
    access = block.access
    return PinOwner(access.tenant, access.session, access.prefix)


def _matches(wanted: PinOwner, owner: PinOwner) -> bool:
    return (
        wanted.tenant in ("", owner.tenant)
        and wanted.session in ("", owner.session)
        and wanted.prefix in ("", owner.prefix)
    )

"""A policy that refuses blocks, in a tier above another one and alone."""

from __future__ import annotations

from typing import Any

from policies.access import Access
from policies.eviction import LruEviction
from policies.eviction.lru import LruQueue
from prefix_store.base import BlockHash
from prefix_store.simulation.tier import BlockShape, SimulatedTier


class Closed(LruQueue[Any]):
    """Refuses every block that would need room."""

    def admits(self, block: Any, now: float) -> bool:
        del block, now
        return False


class ClosedEviction:
    """Makes such queues."""

    def queue(self) -> Closed:
        return Closed()


def in_memory_after_two_prompts(below: SimulatedTier | None) -> list[bool]:
    """Room for one prompt of two blocks; two come."""
    tier = SimulatedTier("memory", 2, ClosedEviction(), below=below)
    for time_s, name in enumerate("ab"):
        chain = [BlockHash(f"{name}{depth}".encode()) for depth in range(2)]
        tier.take_in([], chain, BlockShape(16, 1), Access(time_s=time_s), time_s)
    return [BlockHash(name.encode()) in tier.index for name in ("a0", "b0")]


def test_a_tier_alone_keeps_what_its_policy_prefers() -> None:
    """The second prompt is refused."""
    assert in_memory_after_two_prompts(None) == [True, False]


def test_a_tier_above_another_refuses_nothing() -> None:
    """The second prompt comes in and the first one goes down, where it is found again."""
    disk = SimulatedTier("disk", 9, LruEviction())
    assert in_memory_after_two_prompts(disk) == [False, True]
    assert BlockHash(b"a1") in disk.index

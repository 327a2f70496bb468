"""A tier above others refuses nothing on its kind's word."""

from __future__ import annotations

from typing import Any

from policies.access import Access, Retention
from policies.eviction import LruEviction
from policies.eviction.lru import LruQueue
from policies.eviction.retained import Retained, let_all_in


class Picky(LruQueue[Any]):
    """Refuses everything."""

    def admits(self, block: Any, now: float) -> bool:
        del block, now
        return False


class PickyEviction:
    """Makes such queues."""

    def queue(self) -> Picky:
        return Picky()


class Newcomer:
    """A block that wants in."""

    hash, depth, num_tokens, num_bytes, inserted, last_used, mark = b"", 0, 1, 1, 0, 0, None

    def __init__(self, priority: int = 50) -> None:
        self.access = Access(retention=Retention(priority=priority))


def test_a_kind_that_refuses_lets_all_in_where_a_tier_lies_below() -> None:
    """Its order stays."""
    queue = let_all_in(PickyEviction()).queue()
    first, second = Newcomer(), Newcomer()
    for block in (first, second):
        queue.insert(block)
        queue.add(block)
    assert queue.admits(Newcomer(), 0.0)
    queue.discard(first)
    assert len(queue) == 1
    assert queue.pop(0.0) is second
    assert not PickyEviction().queue().admits(Newcomer(), 0.0)


def test_retention_may_still_keep_a_block_out() -> None:
    """What would be the next to go by its priority is not worth the room of another."""
    queue = let_all_in(Retained(PickyEviction())).queue()
    kept = Newcomer(priority=50)
    queue.insert(kept)
    queue.add(kept)
    assert queue.admits(Newcomer(priority=50), 0.0)
    assert not queue.admits(Newcomer(priority=10), 0.0)


def test_equal_policies_stay_equal() -> None:
    """So that a reload that changes nothing keeps what was learned."""
    assert let_all_in(Retained(LruEviction())) == let_all_in(Retained(LruEviction()))

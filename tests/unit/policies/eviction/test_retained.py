"""Retention on top of a kind: pins, expiry, priorities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from policies.access import PLAIN, Access, Retention
from policies.eviction import LruEviction
from policies.eviction.retained import Retained, RetainedQueue


@dataclass(eq=False)
class Kept:
    """A block with a name."""

    hash: bytes
    access: Access
    depth: int = 0
    num_tokens: int = 32
    num_bytes: int = 100
    inserted: int = 0
    last_used: int = 0
    mark: Any = None


def new_queue(pin_budget_bytes: int = 0) -> RetainedQueue[Kept]:
    return Retained(LruEviction(), pin_budget_bytes).queue()


def keep(queue: RetainedQueue[Kept], name: str, retention: Retention, time_s: float = 0.0) -> Kept:
    block = Kept(name.encode(), Access(time_s, retention=retention), last_used=int(time_s))
    queue.insert(block)
    queue.add(block)
    return block


def use(queue: RetainedQueue[Kept], block: Kept, retention: Retention, time_s: float) -> None:
    block.access, block.last_used = Access(time_s, retention=retention), int(time_s)
    queue.use([block])
    queue.add(block)


def drain(queue: RetainedQueue[Kept], now: float) -> str:
    names = ""
    while (block := queue.pop(now)) is not None:
        queue.remove(block)
        names += block.hash.decode()
    assert len(queue) == 0
    return names


def test_expired_goes_first_then_low_priority_then_the_kind_decides() -> None:
    """The whole order at once."""
    queue = new_queue()
    keep(queue, "a", PLAIN, 1)
    keep(queue, "b", PLAIN, 2)
    keep(queue, "c", Retention(priority=0), 3)
    keep(queue, "d", Retention(priority=100), 0)
    keep(queue, "e", Retention(ttl_s=5, priority=100), 5)
    assert drain(queue, 10.0) == "ecabd"


def test_ttl_counts_from_the_last_use() -> None:
    """A use gives a block its time again."""
    queue = new_queue()
    kept = keep(queue, "k", Retention(ttl_s=10), 0)
    use(queue, kept, Retention(ttl_s=10), 8)
    keep(queue, "p", PLAIN, 5)
    assert queue.pop(17.9) is not kept
    assert queue.pop(18.0) is kept


def test_a_block_moves_with_the_priority_of_its_last_use() -> None:
    """And back, without leaving a copy of itself behind."""
    queue = new_queue()
    kept = keep(queue, "k", PLAIN, 0)
    keep(queue, "p", PLAIN, 5)
    use(queue, kept, Retention(priority=90), 1)
    assert len(queue) == 2
    use(queue, kept, Retention(priority=10), 6)
    assert len(queue) == 2
    assert drain(queue, 7.0) == "kp"


def test_what_becomes_known_later_moves_a_block_when_it_is_added_again() -> None:
    """The retention of the last use may change behind the block's back."""
    queue = new_queue()
    kept = keep(queue, "k", PLAIN, 0)
    keep(queue, "p", PLAIN, 5)
    kept.access.retention = Retention(priority=90)
    queue.add(kept)
    assert drain(queue, 7.0) == "pk"


def test_a_pinned_block_is_no_candidate_until_its_time_is_over() -> None:
    """Then it has expired, so it is the first."""
    queue = new_queue(1000)
    kept = keep(queue, "k", Retention(ttl_s=10, pin=True), 0)
    plain = keep(queue, "p", PLAIN, 1)
    assert len(queue) == 1
    assert [queue.pop(9.9), queue.pop(9.9)] == [plain, None]
    queue.add(plain)
    assert queue.pop(10.0) is kept


def test_a_pin_outlives_a_later_use_without_pin() -> None:
    """Whoever uses a pinned prefix without a name does not take the pin away."""
    queue = new_queue(1000)
    kept = keep(queue, "k", Retention(ttl_s=10, pin=True), 0)
    use(queue, kept, PLAIN, 5)
    assert queue.pop(9.0) is None
    assert [pin.block for pin in queue.pinned(9.0)] == [kept]
    assert queue.pop(10.0) is kept


def test_pins_beyond_the_budget_are_counted_and_do_not_hold() -> None:
    """First come, first kept."""
    queue = new_queue(250)
    for name in "abc":
        keep(queue, name, Retention(ttl_s=10, pin=True), 0)
    assert (queue.pinned_bytes, queue.pins_refused, len(queue)) == (200, 1, 1)
    assert drain(queue, 1.0) == "c"


def test_ended_pins_make_room_for_new_ones() -> None:
    """The budget is for pins that hold."""
    queue = new_queue(100)
    keep(queue, "a", Retention(ttl_s=10, pin=True), 0)
    keep(queue, "b", Retention(ttl_s=10, pin=True), 10)
    assert [(pin.block.hash, pin.time_s) for pin in queue.pinned(10.0)] == [(b"b", 20.0)]
    assert queue.pinned_bytes == 100


def test_removed_and_unpinned_blocks_give_their_budget_back() -> None:
    """Whichever way a pin ends."""
    queue = new_queue(1000)
    a = keep(queue, "a", Retention(ttl_s=10, pin=True), 0)
    b = keep(queue, "b", Retention(ttl_s=10, pin=True), 0)
    queue.remove(a)
    assert queue.pinned_bytes == 100
    assert queue.unpin(b)
    assert not queue.unpin(b)
    assert queue.pinned_bytes == 0
    queue.add(b)
    assert queue.pop(1.0) is b


def test_a_plain_candidate_can_be_pinned_and_comes_back() -> None:
    """A pin by hand, not by a rule."""
    queue = new_queue(100)
    a, b = keep(queue, "a", PLAIN, 0), keep(queue, "b", PLAIN, 1)
    assert queue.pin(a, 5.0)
    assert not queue.pin(b, 5.0)
    assert queue.pop(1.0) is b
    assert queue.pop(4.9) is None
    assert queue.pop(5.0) is a


def test_a_newcomer_of_lower_priority_than_every_victim_is_not_worth_the_room() -> None:
    """It would be the next to go; one of higher priority, or an expired victim, lets it in."""
    queue = new_queue(100)
    low = Kept(b"l", Access(retention=Retention(priority=10)))
    high = Kept(b"h", Access(retention=Retention(priority=90)))
    pinned = Kept(b"i", Access(retention=Retention(ttl_s=5, priority=10, pin=True)))
    assert queue.admits(low, 0.0)
    keep(queue, "p", PLAIN, 0)
    assert [queue.admits(block, 0.0) for block in (low, high, pinned)] == [False, True, True]
    keep(queue, "e", Retention(ttl_s=5), 0)
    assert [queue.admits(low, now) for now in (4.0, 5.0)] == [False, True]


def test_a_use_without_ttl_takes_the_old_deadline_away() -> None:
    """The last use decides, not an earlier one."""
    queue = new_queue()
    kept = keep(queue, "k", Retention(ttl_s=10), 0)
    keep(queue, "p", PLAIN, 1)
    use(queue, kept, Retention(priority=90), 2)
    assert drain(queue, 11.0) == "pk"


def test_of_blocks_that_expire_together_the_deepest_goes_first() -> None:
    """One request's blocks have one deadline."""
    queue = new_queue()
    access = Access(0.0, retention=Retention(ttl_s=5))
    for depth in (3, 9, 1):
        block = Kept(bytes([depth]), access, depth)
        queue.insert(block)
        queue.add(block)
    victims = [queue.pop(5.0) for _ in range(3)]
    assert [block.depth for block in victims if block is not None] == [9, 3, 1]

"""The queue that tenants share: who is next, who gives way, what is remembered."""

from __future__ import annotations

from gateway.fleet.fair_queue import FairQueue
from gateway.fleet.tenant_line import Queued
from gateway.fleet.ticket import Ticket


def queue_of(capacity: int = 10_000) -> FairQueue[str]:
    return FairQueue(capacity, turn_tokens=0.0)


def push(queue: FairQueue[str], name: str, tenant: str = "a", **more) -> Queued[str] | None:
    return queue.push(Queued(Ticket(tenant, **more), name))


def pop(queue: FairQueue[str], now: float = 0.0) -> str | None:
    served = queue.pop(now)
    return None if served is None else served.item


def served_tenants(queue: FairQueue[str], num: int) -> str:
    served = (queue.pop(0.0) for _ in range(num))
    return "".join(each.ticket.tenant for each in served if each is not None)


def test_a_single_request_is_not_behind_a_thousand_of_another_tenant():
    """At most one of the others is served before it."""
    queue = queue_of()
    for number in range(1000):
        push(queue, f"a{number}", cost=500.0)
    for _ in range(100):
        pop(queue)
    push(queue, "single", "b", cost=500.0)
    assert "single" in (pop(queue), pop(queue))


def test_who_was_idle_has_no_credit():
    """Having asked for nothing for long, a tenant does not get all places for long."""
    queue = queue_of()
    for number in range(200):
        push(queue, f"a{number}", cost=10.0)
    push(queue, "b", "b", cost=10.0)
    served_tenants(queue, 100)
    for number in range(50):
        push(queue, f"b{number}", "b", cost=10.0)
    assert served_tenants(queue, 40).count("b") in (20, 21)


def test_weights_are_shares():
    """Twice the weight, twice the tokens."""
    queue = queue_of()
    for number in range(100):
        push(queue, str(number), "a", weight=2.0, cost=10.0)
        push(queue, str(number), "b", weight=1.0, cost=10.0)
    assert served_tenants(queue, 30).count("a") == 20


def test_cost_counts():
    """Ten times the tokens, a tenth of the requests."""
    queue = queue_of()
    for number in range(100):
        push(queue, str(number), "a", cost=100.0)
        push(queue, str(number), "b", cost=10.0)
    assert served_tenants(queue, 44).count("a") == 4


def test_what_is_cached_is_not_free():
    """An answer takes a place for a while whatever its prompt costs."""
    queue: FairQueue[str] = FairQueue(10_000)
    for number in range(100):
        push(queue, str(number), "cached", cost=1.0)
        push(queue, str(number), "cold", cost=256.0)
    assert queue.pop(0.0) is not None
    served = [queue.pop(0.0) for _ in range(30)]
    assert sum(each is not None and each.ticket.tenant == "cold" for each in served) in (10, 11)


def test_priority_orders_within_a_tenant_only():
    """Lower first, equals in order of arrival; other tenants are not affected."""
    queue = queue_of()
    push(queue, "a-late", priority=5)
    push(queue, "a-first", priority=-1)
    push(queue, "a-second", priority=-1)
    push(queue, "b", "b", priority=9)
    assert [pop(queue) for _ in range(5)] == ["a-first", "b", "a-second", "a-late", None]


def test_expired_tickets_are_not_served():
    """And an early deadline does not help anybody forward."""
    queue = queue_of()
    push(queue, "expired", deadline=1.0)
    push(queue, "no hurry")
    push(queue, "hurry", deadline=3.0)
    assert [pop(queue, 2.0) for _ in range(3)] == ["no hurry", "hurry", None]
    assert len(queue) == 0


def test_what_is_served_without_waiting_is_paid_for():
    """Who took the free places waits behind the others once there are none."""
    queue = queue_of()
    for _ in range(10):
        queue.pass_by(Ticket("a", cost=10.0))
    push(queue, "a", "a", cost=10.0)
    push(queue, "b", "b", cost=10.0)
    assert pop(queue) == "b"


def test_a_request_that_went_away_keeps_no_early_turn():
    """Its tenant comes back as one that was idle."""
    queue = queue_of()
    gone = Queued(Ticket("b", cost=10.0), "gone")
    queue.push(gone)
    queue.remove(gone)
    for _ in range(10):
        queue.pass_by(Ticket("a", cost=10.0))
    push(queue, "a", cost=10.0)
    for number in range(3):
        push(queue, f"b{number}", "b", cost=10.0)
    assert [pop(queue) for _ in range(4)] == ["b0", "a", "b1", "b2"]


def test_nobody_owes_anything_after_a_rest():
    """Then it is first come, first served again."""
    queue = queue_of()
    queue.pass_by(Ticket("a", cost=1e6))
    queue.rest()
    push(queue, "a", "a")
    push(queue, "b", "b")
    assert pop(queue) == "a"


def test_a_flood_does_not_shut_out_others():
    """A full queue takes newcomers until the tenants hold equally much."""
    queue = queue_of(4)
    for number in range(4):
        assert push(queue, f"a{number}") is None
    gone = [push(queue, f"b{number}", "b") for number in range(3)]
    assert [each and each.item for each in gone] == ["a3", "a2", "b2"]
    assert push(queue, "c0", "c").item in ("a1", "b1")
    assert len(queue) == 4


def test_who_held_most_earlier_does_not_give_way_for_it():
    """What counts is what waits now."""
    queue = queue_of(5)
    flood = [Queued(Ticket("a"), f"a{number}") for number in range(5)]
    for each in flood:
        queue.push(each)
    for each in flood[:3]:
        queue.remove(each)
    for number in range(3):
        assert push(queue, f"b{number}", "b") is None
    assert push(queue, "c0", "c").item == "b2"


def test_the_flood_itself_is_refused():
    """Its own newcomers push out nobody."""
    queue = queue_of(2)
    push(queue, "a0")
    push(queue, "a1")
    assert push(queue, "a2").item == "a2"


def test_the_only_ticket_of_a_tenant_stays():
    """However many tenants come."""
    queue = queue_of(2)
    push(queue, "a0", "a")
    push(queue, "b0", "b")
    assert push(queue, "c0", "c", weight=100.0).item == "c0"


def test_the_least_urgent_gives_way():
    """To the same tenant's more urgent one, too."""
    queue = queue_of(3)
    for name, priority in (("a0", 7), ("a1", 1), ("a2", 7)):
        push(queue, name, priority=priority)
    assert push(queue, "b0", "b").item == "a2"
    assert push(queue, "a3", priority=0).item == "a0"
    assert push(queue, "a4", priority=9).item == "a4"


def test_a_queue_without_capacity_refuses_all():
    """`max_waiting: 0`."""
    assert push(queue_of(0), "a").item == "a"


def test_memory_is_bounded_whatever_comes_and_goes():
    """Tenants that owe, and tickets that left from the middle, do not pile up."""
    queue = queue_of(10)
    push(queue, "first")
    for number in range(20_000):
        gone = Queued(Ticket(f"t{number}", priority=number % 7), "x")
        assert queue.push(gone) is None
        queue.remove(gone)
    assert len(queue._tenants) + len(queue._turns) + len(queue._loads) < 8500
    assert pop(queue) == "first"
    for number in range(20_000):
        queue.pass_by(Ticket(f"t{number}", cost=1.0 + number % 100))
    assert len(queue._tenants) < 2100
    assert len(queue._turns) + len(queue._loads) < 8500


def test_memory_of_one_line_is_bounded():
    """A tenant whose requests are cancelled before their turn."""
    queue = queue_of(10)
    push(queue, "first")
    for number in range(5000):
        gone = Queued(Ticket("a", priority=number % 3), "x")
        queue.push(gone)
        queue.remove(gone)
    line = queue._tenants["a"].line
    assert len(line._first) + len(line._last) < 100
    assert pop(queue) == "first"

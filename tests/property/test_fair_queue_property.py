"""The fair queue against a plain list that is searched anew each time."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from gateway.fleet.fair_queue import FairQueue
from gateway.fleet.tenant_line import Queued
from gateway.fleet.ticket import Ticket

TURN_TOKENS = 8.0
WEIGHTS = {"a": 1.0, "b": 2.0, "c": 0.5, "d": 1.0}


@st.composite
def tickets(draw: st.DrawFn) -> Ticket:
    tenant = draw(st.sampled_from(sorted(WEIGHTS)))
    return Ticket(
        tenant,
        WEIGHTS[tenant],
        priority=draw(st.integers(-2, 2)),
        cost=float(draw(st.integers(0, 100))),
        deadline=draw(st.sampled_from([None, None, None, 5.0, 20.0, 40.0, 60.0])),
    )


STEPS = st.lists(
    st.one_of(
        tickets(),
        tickets(),
        tickets(),
        st.just("pop"),
        st.just("pop"),
        st.integers(-1, 30).map(lambda n: n if n > 0 else "clear" if n else "rest"),
    ),
    min_size=30,
    max_size=60,
)
"""Numbers: that one of those that wait goes."""


def place_of(queued: Queued[int]) -> tuple[int, int]:
    return (queued.ticket.priority, queued.item)


@dataclass
class Model:
    """What the queue must do, in O(n)."""

    capacity: int
    waiting: list[Queued[int]] = field(default_factory=list)
    finish: dict[str, float] = field(default_factory=dict)
    time: float = 0.0

    def start(self, tenant: str) -> float:
        return max(self.time, self.finish.get(tenant, 0.0))

    def count(self, tenant: str) -> int:
        return sum(each.ticket.tenant == tenant for each in self.waiting)

    def serve(self, ticket: Ticket) -> None:
        self.time = self.start(ticket.tenant)
        self.finish[ticket.tenant] = self.time + (TURN_TOKENS + ticket.cost) / ticket.weight

    def load_if_one_went(self, tenant: str) -> float:
        return (self.count(tenant) - 1) / WEIGHTS[tenant]

    def may_be_pushed_out(self, newcomer: Queued[int]) -> list[Queued[int]]:
        """One of them must be, where there are any."""
        if len(self.waiting) < self.capacity:
            return []
        own = newcomer.ticket.tenant
        least = (self.count(own) + 1) / WEIGHTS[own]
        others = {each.ticket.tenant for each in self.waiting} - {own}
        most = max((self.load_if_one_went(each) for each in others), default=-1.0)
        if most >= least:
            tenants = [each for each in others if self.load_if_one_went(each) == most]
            return [max(self.of(each), key=place_of) for each in tenants]
        less_urgent = [e for e in self.of(own) if e.ticket.priority > newcomer.ticket.priority]
        return [max(less_urgent, key=place_of)] if less_urgent else [newcomer]

    def of(self, tenant: str) -> list[Queued[int]]:
        return [each for each in self.waiting if each.ticket.tenant == tenant]

    def check_served(self, served: Queued[int] | None, now: float) -> None:
        left = [each for each in self.waiting if not each.ticket.expired(now)]
        if served is None:
            assert left == []
            return
        assert served in left
        least = min(self.start(each.ticket.tenant) for each in left)
        assert self.start(served.ticket.tenant) == least
        same = [each for each in left if each.ticket.tenant == served.ticket.tenant]
        assert served is min(same, key=place_of)


class Both:
    """The queue and its model, side by side."""

    def __init__(self, capacity: int) -> None:
        self.queue: FairQueue[int] = FairQueue(capacity, turn_tokens=TURN_TOKENS)
        self.model = Model(capacity)

    def come(self, ticket: Ticket, now: int) -> None:
        queue, model = self.queue, self.model
        if not model.waiting and now % 3 == 0:
            queue.pass_by(ticket)
            model.serve(ticket)
            return
        newcomer = Queued(ticket, now)
        allowed = model.may_be_pushed_out(newcomer)
        gone = queue.push(newcomer)
        assert gone in allowed if allowed else gone is None
        model.waiting = [each for each in [*model.waiting, newcomer] if each is not gone]

    def pop(self, now: int) -> None:
        model = self.model
        served = self.queue.pop(now)
        model.check_served(served, now)
        if served is not None:
            model.serve(served.ticket)
        for each in model.waiting:
            assert each.waits or each is served or each.ticket.expired(now)
        model.waiting = [each for each in model.waiting if each.waits]

    def remove(self, number: int) -> None:
        if self.model.waiting:
            goes = self.model.waiting.pop(number % len(self.model.waiting))
            assert self.queue.remove(goes)
            assert not self.queue.remove(goes)

    def clear(self) -> None:
        gone = self.queue.clear()
        assert sorted(e.item for e in gone) == sorted(e.item for e in self.model.waiting)
        self.model.waiting = []

    def rest(self) -> None:
        if not self.model.waiting:
            self.queue.rest()
            self.model.finish, self.model.time = {}, 0.0


@given(STEPS, st.integers(0, 8))
def test_it_does_what_a_search_through_all_tickets_would_do(steps, capacity):
    """Whom it serves, whom it pushes out, who is still in; with expired ones and removals."""
    both = Both(capacity)
    for now, step in enumerate(steps):
        if isinstance(step, Ticket):
            both.come(step, now)
        elif isinstance(step, int):
            both.remove(step)
        elif step == "pop":
            both.pop(now)
        else:
            (both.clear if step == "clear" else both.rest)()
        assert len(both.queue) == len(both.model.waiting)
        assert all(each.waits for each in both.model.waiting)


@given(
    st.lists(
        st.tuples(
            st.sampled_from([0.5, 1.0, 3.0]),
            st.lists(st.integers(1, 500), min_size=20, max_size=20),
        ),
        min_size=2,
        max_size=4,
    ),
    st.integers(1, 20),
)
def test_tenants_that_wait_get_service_in_proportion_to_their_weights(tenants, num_served):
    """The theorem of start-time fair queueing: what two tenants got, divided by their weights,
    differs by no more than one ticket of each."""
    queue: FairQueue[int] = FairQueue(10_000, turn_tokens=0.0)
    largest = {}
    for number, (weight, costs) in enumerate(tenants):
        largest[str(number)] = max(costs) / weight
        for cost in costs:
            queue.push(Queued(Ticket(str(number), weight, cost=float(cost)), number))
    got = dict.fromkeys(largest, 0.0)
    for _ in range(num_served):
        served = queue.pop(0.0)
        assert served is not None
        got[served.ticket.tenant] += served.ticket.cost / served.ticket.weight
    for one in got:
        for other in got:
            assert abs(got[one] - got[other]) <= largest[one] + largest[other] + 1e-6

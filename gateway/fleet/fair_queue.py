"""A bounded queue that tenants share fairly, by start-time fair queueing. No I/O.

Every tenant has a virtual time at which its next ticket may start: that of its last one plus
cost / weight. The queue serves the tenant whose time is least, and that time is the time of the
queue; who comes back begins there, so nobody saves up credit while idle, and a thousand tickets
of one tenant stand behind the single one of another. (Goyal, Vin, Cheng: Start-time Fair
Queueing, SIGCOMM 1996.)
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace, nlargest
from typing import Generic, TypeVar

from gateway.fleet.tenant_line import Queued, TenantLine
from gateway.fleet.ticket import Ticket

T = TypeVar("T")

_TURN_TOKENS = 256.0
_MAX_DEBTORS = 1024
"""So many tenants without a ticket are remembered for what they owe."""
_SLACK = 64


class _Tenant(Generic[T]):
    """A tenant that has tickets in the queue, or owes for those that were served."""

    __slots__ = ("has_turn", "line", "start", "weight")

    def __init__(self, start: float) -> None:
        self.line: TenantLine[T] = TenantLine()
        self.weight = 1.0
        self.start = start
        """When its next ticket may start, in the queue's virtual time."""
        self.has_turn = False

    @property
    def load(self) -> float:
        """Tickets that would wait if one less did, in units of its weight."""
        return (len(self.line) - 1) / self.weight


class FairQueue(Generic[T]):
    """Among tenants by weight and cost, within a tenant by priority and arrival.

    When it is full, a newcomer pushes out the last ticket of the tenant that holds most for its
    weight, if that tenant still holds no less than the newcomer's afterwards: a flood does not
    shut out others, and the only ticket of a tenant is never pushed out. Every operation is
    O(log n), amortised.
    """

    def __init__(self, capacity: int, *, turn_tokens: float = _TURN_TOKENS) -> None:
        """`turn_tokens`: what every ticket costs beside its tokens, since the answer takes time
        also where nothing of the prompt is computed."""
        self._capacity = capacity
        self._turn_tokens = turn_tokens
        self._time = 0.0
        self._order = 0
        self._count = 0
        self._tenants: dict[str, _Tenant[T]] = {}
        # One entry for every tenant with tickets. Entries of tenants whose tickets were removed
        # stay until they come up; their time is right all the while, since nothing was served.
        self._turns: list[tuple[float, int, _Tenant[T]]] = []
        # Each tenant with tickets has an entry here that is not below its load.
        self._loads: list[tuple[float, int, _Tenant[T]]] = []

    def __len__(self) -> int:
        return self._count

    def push(self, newcomer: Queued[T]) -> Queued[T] | None:
        """Returns who has no place in the queue (any more): nobody, one that waited, or the
        newcomer itself."""
        ticket = newcomer.ticket
        gone = None
        if self._count >= self._capacity:
            gone = self._weakest_against(ticket)
            if gone is None:
                return newcomer
            self.remove(gone)
        tenant = self._tenant(ticket)
        newcomer.order = self._next_order()
        tenant.line.add(newcomer)
        self._count += 1
        if not tenant.has_turn:
            tenant.has_turn = True
            tenant.start = max(tenant.start, self._time)
            heappush(self._turns, (tenant.start, self._next_order(), tenant))
        heappush(self._loads, (-tenant.load, newcomer.order, tenant))
        if len(self._loads) > 2 * len(self._tenants) + _SLACK:
            self._rebuild_loads()
        return gone

    def first(self, now: float) -> Queued[T] | None:
        """The next to be served. Those whose deadline has passed leave the queue on the way."""
        while self._turns:
            tenant = self._turns[0][2]
            queued = tenant.line.first()
            if queued is None:
                heappop(self._turns)
                tenant.has_turn = False
            elif queued.ticket.expired(now):
                self.remove(queued)
            else:
                return queued
        return None

    def pop(self, now: float) -> Queued[T] | None:
        """Serve the next: it leaves the queue, and its tenant pays."""
        queued = self.first(now)
        if queued is None:
            return None
        tenant = self._turns[0][2]
        self.remove(queued)
        self._pay(tenant, queued.ticket)
        if tenant.line:
            heapreplace(self._turns, (tenant.start, self._next_order(), tenant))
        else:
            heappop(self._turns)
            tenant.has_turn = False
        return queued

    def remove(self, queued: Queued[T]) -> bool:
        """Whether it was still in the queue."""
        if not queued.waits:
            return False
        self._tenants[queued.ticket.tenant].line.remove(queued)
        self._count -= 1
        return True

    def pass_by(self, ticket: Ticket) -> None:
        """A ticket that is served without waiting; nobody waits. Its tenant pays all the same."""
        for _, _, left in self._turns:
            left.has_turn = False
        self._turns.clear()
        tenant = self._tenant(ticket)
        tenant.start = max(tenant.start, self._time)
        self._pay(tenant, ticket)

    def clear(self) -> list[Queued[T]]:
        """Take all out that wait, in no order. Nobody pays."""
        gone = []
        for tenant in self._tenants.values():
            while (queued := tenant.line.first()) is not None:
                self.remove(queued)
                gone.append(queued)
        return gone

    def rest(self) -> None:
        """Nobody waits and all that was served is done: nobody owes anything."""
        self._tenants.clear()
        self._turns.clear()
        self._loads.clear()
        self._time = 0.0

    def _pay(self, tenant: _Tenant[T], ticket: Ticket) -> None:
        self._time = tenant.start
        tenant.start += (self._turn_tokens + ticket.cost) / tenant.weight

    def _next_order(self) -> int:
        self._order += 1
        return self._order

    def _weakest_against(self, ticket: Ticket) -> Queued[T] | None:
        """Of the tenant that holds most, or else of the newcomer's own if less urgent."""
        own = self._tenants.get(ticket.tenant)
        num_own = 0 if own is None else len(own.line)
        heaviest = self._heaviest()
        if (
            heaviest is not None
            and heaviest is not own
            and heaviest.load >= (num_own + 1) / ticket.weight
        ):
            return heaviest.line.last()
        last = None if own is None else own.line.last()
        return last if last is not None and last.ticket.priority > ticket.priority else None

    def _heaviest(self) -> _Tenant[T] | None:
        while self._loads:
            load, order, tenant = self._loads[0]
            if not tenant.line:
                heappop(self._loads)
            elif -load == tenant.load:
                return tenant
            else:  # it holds less by now
                heapreplace(self._loads, (-tenant.load, order, tenant))
        return None

    def _rebuild_loads(self) -> None:
        waiting = [tenant for tenant in self._tenants.values() if tenant.line]
        self._loads = [(-tenant.load, self._next_order(), tenant) for tenant in waiting]
        heapify(self._loads)

    def _tenant(self, ticket: Ticket) -> _Tenant[T]:
        tenant = self._tenants.get(ticket.tenant)
        if tenant is None:
            if len(self._tenants) >= 2 * self._capacity + 2 * _MAX_DEBTORS:
                self._forget_debtors()
            tenant = self._tenants[ticket.tenant] = _Tenant(self._time)
        tenant.weight = ticket.weight
        return tenant

    def _forget_debtors(self) -> None:
        """All but those that owe most."""
        idle = {name: t for name, t in self._tenants.items() if not t.line}
        keep = nlargest(_MAX_DEBTORS, idle.items(), key=lambda pair: pair[1].start)
        kept = {name for name, tenant in keep if tenant.start > self._time}
        for name, tenant in idle.items():
            tenant.has_turn = False
            if name not in kept:
                del self._tenants[name]
        self._turns = [turn for turn in self._turns if turn[2].line]
        heapify(self._turns)

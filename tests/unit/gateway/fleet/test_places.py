"""Bounded concurrency: order, refusals, limits that change, and waiters that go away."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.fleet.places import REPLICA_KEYS, PlaceLostError, Places
from gateway.fleet.ticket import Ticket
from gateway.web.errors import DeadlineError, TooManyRequestsError, UnavailableError


class Guests:
    """Tasks that hold a place until they are told to leave."""

    def __init__(self, places: Places) -> None:
        self.places = places
        self.inside: list[int] = []
        self.came: list[int] = []
        self._leave: dict[int, asyncio.Event] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def _visit(self, guest: int, ticket: Ticket) -> None:
        async with self.places.place(ticket):
            self.inside.append(guest)
            self.came.append(guest)
            try:
                await self._leave[guest].wait()
            finally:
                self.inside.remove(guest)

    def start(self, guest: int, tenant: str = "a", **more: object) -> None:
        self._leave[guest] = asyncio.Event()
        self._tasks[guest] = asyncio.create_task(self._visit(guest, Ticket(tenant, **more)))

    async def come(self, guest: int, tenant: str = "a", **more: object) -> None:
        self.start(guest, tenant, **more)
        await turn()

    def leave(self, guest: int) -> None:
        if guest in self._leave:
            self._leave[guest].set()

    def cancel(self, guest: int) -> None:
        if guest in self._tasks:
            self._tasks[guest].cancel()

    @property
    def outside(self) -> int:
        """Those that have neither come in nor gone."""
        return sum(not task.done() for task in self._tasks.values()) - len(self.inside)

    async def fate(self, guest: int) -> BaseException | None:
        return (await asyncio.gather(self._tasks[guest], return_exceptions=True))[0]

    async def end(self) -> list[BaseException | None]:
        for event in self._leave.values():
            event.set()
        return await asyncio.gather(*self._tasks.values(), return_exceptions=True)


async def turn() -> None:
    """Let everything that can run, run."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_first_come_first_served():
    """Whoever waits longest gets the next place."""
    guests = Guests(Places(2, 10, 10.0))
    for guest in range(5):
        await guests.come(guest)
    assert (guests.places.running, guests.places.waiting) == (2, 3)
    for guest in range(5):
        guests.leave(guest)
        await turn()
    assert guests.came == [0, 1, 2, 3, 4]
    assert (guests.places.running, guests.places.waiting) == (0, 0)
    await guests.end()


async def test_tenants_take_turns_and_urgent_requests_come_first():
    """The order is that of the fair queue."""
    guests = Guests(Places(1, 10, 10.0))
    for guest in range(4):
        await guests.come(guest)
    await guests.come(4, priority=-1)
    await guests.come(5, "b")
    for guest in (0, 5, 4, 1, 2, 3):
        guests.leave(guest)
        await turn()
    assert guests.came[0] == 0
    assert set(guests.came[1:3]) == {4, 5}
    assert guests.came[3:] == [1, 2, 3]
    await guests.end()


async def test_no_more_may_wait_than_allowed():
    """The next is refused at once, and told what to change and when to come again."""
    guests = Guests(Places(1, 1, 10.0, name="replica engine-0", keys=REPLICA_KEYS))
    for guest in range(3):
        await guests.come(guest)
    results = await guests.end()
    assert [type(result) for result in results] == [type(None), type(None), TooManyRequestsError]
    assert results[2].retry_after_s == 1
    assert results[2].message == (
        "replica engine-0 is full: 1 requests are running and 1 are waiting "
        "(engines[].max_running, engines[].max_waiting)"
    )


async def test_a_flood_gives_way_to_another_tenant():
    """Its last request is answered with 429 so that the other one may wait."""
    guests = Guests(Places(1, 2, 10.0))
    for guest in range(3):
        await guests.come(guest)
    await guests.come(3, "b")
    error = await guests.fate(2)
    assert isinstance(error, TooManyRequestsError)
    assert "gave way" in error.message
    assert "limits.max_waiting_requests" in error.message
    assert guests.places.waiting == 2
    assert [type(e) for e in await guests.end()].count(type(None)) == 3


async def test_waiting_has_an_end():
    """And leaves no trace."""
    places = Places(1, 1, 0.0)
    async with places.place(Ticket("a")):
        with pytest.raises(UnavailableError, match=r"within 0 s \(limits\.max_wait, limits\.max_c"):
            await places.enter(Ticket("a"))
        assert (places.running, places.waiting) == (1, 0)
    assert places.running == 0


async def test_a_deadline_that_has_passed_is_an_error_at_once():
    """Even where a place is free: nobody wants the answer any more."""
    places = Places(1, 1, 10.0)
    with pytest.raises(DeadlineError, match=r"limits\.max_concurrent_requests"):
        await places.enter(Ticket("a", deadline=asyncio.get_running_loop().time()))
    assert places.running == 0


async def test_a_deadline_that_passes_while_waiting_is_an_error_then():
    """504, as for everything that took too long; who waits behind is not affected."""
    guests = Guests(Places(1, 5, 10.0))
    await guests.come(0)
    await guests.come(1, deadline=asyncio.get_running_loop().time() + 0.01)
    await guests.come(2)
    error = await guests.fate(1)
    assert isinstance(error, DeadlineError)
    assert (error.status, error.code) == (504, "deadline_exceeded")
    assert guests.places.waiting == 1
    guests.leave(0)
    await turn()
    assert guests.inside == [2]
    await guests.end()


async def test_more_places_are_handed_out_at_once():
    """A replica that has become warm."""
    guests = Guests(Places(1, 10, 10.0))
    for guest in range(4):
        await guests.come(guest)
    guests.places.set_limit(3)
    await turn()
    assert guests.inside == [0, 1, 2]
    await guests.end()


async def test_fewer_places_are_held_back_until_enough_have_left():
    """Nobody is thrown out."""
    guests = Guests(Places(3, 10, 10.0))
    for guest in range(4):
        await guests.come(guest)
    guests.places.set_limit(1)
    await turn()
    assert guests.inside == [0, 1, 2]
    for guest, inside in ((0, [1, 2]), (1, [2]), (2, [3])):
        guests.leave(guest)
        await turn()
        assert guests.inside == inside
    await guests.end()


async def test_all_who_wait_can_be_sent_elsewhere():
    """The replica was ejected; those inside stay until their answers end."""
    guests = Guests(Places(1, 10, 10.0))
    for guest in range(3):
        await guests.come(guest)
    guests.places.set_limit(0)
    assert guests.places.evict_waiting() == 2
    await turn()
    assert (guests.places.running, guests.places.waiting) == (1, 0)
    assert [type(e) for e in await guests.end()] == [type(None), PlaceLostError, PlaceLostError]
    assert guests.places.running == 0


async def test_leaving_more_often_than_entering_is_refused():
    """It would invent a place."""
    with pytest.raises(RuntimeError, match="more have left the gateway"):
        Places(1, 1, 1.0).leave()


async def test_a_place_handed_to_a_waiter_that_goes_is_handed_on():
    """Cancelled in the very moment in which it got the place."""
    guests = Guests(Places(1, 5, 10.0))
    for guest in range(3):
        await guests.come(guest)
    guests.leave(0)
    while 0 in guests.inside:  # noqa: ASYNC110 - one turn of the loop too many would be too late
        await asyncio.sleep(0)
    guests.cancel(1)
    await turn()
    assert guests.inside == [2]
    await guests.end()
    assert (guests.places.running, guests.places.waiting) == (0, 0)


async def test_a_waiter_cancelled_just_before_the_place_is_free_is_passed_over():
    """Its future is cancelled, but it has not run yet."""
    guests = Guests(Places(1, 5, 10.0))
    for guest in range(3):
        await guests.come(guest)
    guests.leave(0)
    guests.cancel(1)
    await turn()
    assert guests.inside == [2]
    await guests.end()
    assert (guests.places.running, guests.places.waiting) == (0, 0)


GUESTS = st.integers(0, 19)
ACTIONS = st.lists(
    st.tuples(
        st.one_of(
            st.tuples(st.just("come"), GUESTS),
            st.tuples(st.just("leave"), GUESTS),
            st.tuples(st.just("cancel"), GUESTS),
            st.tuples(st.just("set_limit"), st.integers(0, 5)),
            st.tuples(st.just("evict"), st.none()),
        ),
        st.integers(0, 3),
    ),
    min_size=10,
    max_size=80,
)


@settings(deadline=None)
@given(ACTIONS)
def test_no_place_is_lost_and_none_invented_whatever_happens_at_the_same_moment(actions):
    """Guests that come, leave and are cancelled between any two turns of the loop, while the limit
    changes: never too many inside, never a free place while one waits, nothing left at the end."""

    async def run() -> None:
        guests = Guests(Places(3, 6, 60.0))
        places = guests.places
        for guest in range(8):
            await guests.come(guest, "abc"[guest % 3])
        came = 8
        for (action, value), turns in actions:
            allowed = max(places.running, places.limit)
            if action == "come":
                guests.start(came, "abc"[value % 3], priority=value % 2, cost=float(value))
                came += 1
            elif action == "set_limit":
                places.set_limit(value)
                allowed = max(allowed, value)
            elif action == "evict":
                places.evict_waiting()
                assert places.waiting == 0
            else:
                (guests.leave if action == "leave" else guests.cancel)(value)
            for _ in range(turns):
                await asyncio.sleep(0)
                assert places.running <= allowed
                assert len(guests.inside) <= places.running
                assert places.running >= places.limit or places.waiting == 0
        await turn()
        assert (places.running, places.waiting) == (len(guests.inside), guests.outside)
        assert places.running >= places.limit or places.waiting == 0
        places.set_limit(1)
        allowed_ends = (type(None), asyncio.CancelledError, TooManyRequestsError, PlaceLostError)
        assert all(isinstance(end, allowed_ends) for end in await guests.end())
        assert (places.running, places.waiting) == (0, 0)
        places.set_limit(2)
        async with places.place(Ticket("a")), places.place(Ticket("b")):
            assert places.running == 2

    asyncio.run(run())

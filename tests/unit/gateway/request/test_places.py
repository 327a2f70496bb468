"""Bounded concurrency: order, refusals, and waiters that go away."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.request.places import Places
from gateway.web.errors import TooManyRequestsError, UnavailableError


class Guests:
    """Tasks that hold a place until they are told to leave."""

    def __init__(self, places: Places) -> None:
        self.places = places
        self.inside: list[int] = []
        self.came: list[int] = []
        self._leave: dict[int, asyncio.Event] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def _visit(self, guest: int) -> None:
        async with self.places:
            self.inside.append(guest)
            self.came.append(guest)
            try:
                await self._leave[guest].wait()
            finally:
                self.inside.remove(guest)

    async def come(self, guest: int) -> None:
        self._leave[guest] = asyncio.Event()
        self._tasks[guest] = asyncio.create_task(self._visit(guest))
        await turn()

    def leave(self, guest: int) -> None:
        self._leave[guest].set()

    def cancel(self, guest: int) -> None:
        self._tasks[guest].cancel()

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


async def test_no_more_may_wait_than_allowed():
    """The next is refused at once."""
    guests = Guests(Places(1, 1, 10.0))
    for guest in range(3):
        await guests.come(guest)
    results = await guests.end()
    assert [type(result) for result in results] == [type(None), type(None), TooManyRequestsError]


async def test_waiting_has_an_end():
    """And leaves no trace."""
    places = Places(1, 1, 0.0)
    async with places:
        with pytest.raises(UnavailableError):
            async with places:
                pass
        assert (places.running, places.waiting) == (1, 0)
    assert places.running == 0


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


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["leave", "cancel"]), st.integers(0, 11), st.integers(0, 3)),
        max_size=30,
    )
)
def test_nothing_leaks_whatever_the_guests_do(actions):
    """Never too many inside, never a free place while one waits, nothing left at the end."""

    async def run() -> None:
        guests = Guests(Places(3, 20, 60.0))
        for guest in range(12):
            await guests.come(guest)
        for action, guest, turns in actions:
            (guests.leave if action == "leave" else guests.cancel)(guest)
            for _ in range(turns):
                await asyncio.sleep(0)
            assert len(guests.inside) <= 3
        await turn()
        assert len(guests.inside) == guests.places.running
        assert guests.places.running == 3 or guests.places.waiting == 0
        await guests.end()
        assert (guests.places.running, guests.places.waiting) == (0, 0)

    asyncio.run(run())

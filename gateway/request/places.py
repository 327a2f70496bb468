"""Bounded concurrency: so many requests are with an engine, so many wait, the rest is refused."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress

from gateway.web.errors import TooManyRequestsError, UnavailableError


class Places:
    """First come, first served: `async with places`. A waiter that is cancelled leaves no trace."""

    def __init__(self, max_running: int, max_waiting: int, max_wait_s: float) -> None:
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._max_wait_s = max_wait_s
        self._running = 0
        self._waiters: deque[asyncio.Future[None]] = deque()

    @property
    def running(self) -> int:
        """Requests that have a place."""
        return self._running

    @property
    def waiting(self) -> int:
        """Requests that wait for one."""
        return len(self._waiters)

    async def __aenter__(self) -> None:
        """Take a place, to be given back at the end of the block.

        Raises TooManyRequestsError when nobody more may wait, UnavailableError after max_wait_s.
        """
        if self._running < self._max_running:
            self._running += 1
        else:
            await self._wait()

    async def __aexit__(self, *_: object) -> None:
        self._give_back()

    async def _wait(self) -> None:
        if len(self._waiters) >= self._max_waiting:
            raise TooManyRequestsError(
                f"{self._max_running} requests are running and {self._max_waiting} are waiting "
                "(limits.max_concurrent_requests, limits.max_waiting_requests)",
                retry_after_s=1,
            )
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            async with asyncio.timeout(self._max_wait_s):
                await waiter
        except TimeoutError:
            self._leave(waiter)
            raise UnavailableError(
                f"no place became free within {self._max_wait_s:g} s (limits.max_wait)",
                retry_after_s=1,
            ) from None
        except asyncio.CancelledError:
            self._leave(waiter)
            raise

    def _leave(self, waiter: asyncio.Future[None]) -> None:
        """The waiter goes; a place that it was handed at the same moment goes to the next."""
        if waiter.done() and not waiter.cancelled():
            self._give_back()
            return
        with suppress(ValueError):  # _give_back passed over it before we came here
            self._waiters.remove(waiter)

    def _give_back(self) -> None:
        """The place goes to the first who waits; `running` stays as it is then."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
        self._running -= 1

"""Order among calls: calls for one block run one after another, in the order in which they came;
and a call that has begun runs to its end, whatever becomes of who waits for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from prefix_store.base import BlockHash

T = TypeVar("T")


class Turns:
    """Who waits for whom is settled when a call comes, so calls never wait in a circle."""

    def __init__(self) -> None:
        self._last: dict[BlockHash, asyncio.Future[None]] = {}

    @asynccontextmanager
    async def of(self, hashes: Sequence[BlockHash]) -> AsyncIterator[None]:
        """Hold all of `hashes`, after everybody who asked for one of them earlier."""
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        earlier = {self._last[each] for each in hashes if each in self._last}
        self._last.update(dict.fromkeys(hashes, mine))
        try:
            if earlier:
                await asyncio.wait(earlier)
            yield
        finally:
            mine.set_result(None)
            for each in hashes:
                if self._last.get(each) is mine:
                    del self._last[each]


async def run_to_end(call: Coroutine[Any, Any, T], stop: threading.Event) -> T:
    """Await a call. When the waiter is cancelled, `stop` asks the call to end soon, and the
    cancellation takes effect only after it has: nobody writes into the waiter's buffers then."""
    task = asyncio.create_task(call)
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            cancelled = True
            stop.set()
    if cancelled:
        if not task.cancelled():
            task.exception()  # nobody is left to be told
        raise asyncio.CancelledError
    return task.result()

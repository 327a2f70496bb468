"""A run of records that a few threads read from files, in order as far as that goes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import Executor

from prefix_store.arrivals import Arrivals
from prefix_store.backend import Arrived, KeptBlock
from prefix_store.base import BlockHash
from prefix_store.disk_files import DiskFiles

NEWS_S = 0.001
"""Between two looks at what has come: each takes the interpreter from those who read."""


class DiskRun:
    """Each thread takes the next record, so the first ones are there first."""

    def __init__(
        self,
        files: DiskFiles,
        hashes: Sequence[BlockHash],
        into: Sequence[memoryview],
        arrived: Arrived | None,
    ) -> None:
        self._files = files
        self._hashes = hashes
        self._into = into
        self._arrivals = Arrivals(len(hashes), arrived)
        self._next = iter(range(len(hashes)))  # threads may share it
        self._news = asyncio.Event()

    async def read(
        self, threads: Executor, num_threads: int, stop: threading.Event
    ) -> list[KeptBlock | None]:
        """See `Backend.read`. `stop` leaves the rest unread; no thread is at work afterwards."""
        loop = asyncio.get_running_loop()
        shares = [
            loop.run_in_executor(threads, self._read_some, loop, stop)
            for _ in range(min(num_threads, len(self._hashes)))
        ]
        for share in shares:
            share.add_done_callback(lambda _: self._news.set())
        try:
            while not all(share.done() for share in shares):
                await self._news.wait()
                self._news.clear()  # before the look: what comes after it is news again
                self._arrivals.tell()
                await asyncio.sleep(NEWS_S)
            self._arrivals.tell()
        finally:
            stop.set()
            if shares:
                await asyncio.wait(shares)
        for share in shares:
            share.result()
        return self._arrivals.blocks

    def _read_some(self, loop: asyncio.AbstractEventLoop, stop: threading.Event) -> None:
        """In each of the threads."""
        for i in self._next:
            if stop.is_set():
                return
            self._arrivals.blocks[i] = self._files.read(self._hashes[i], self._into[i])
            if not self._news.is_set():
                loop.call_soon_threadsafe(self._news.set)

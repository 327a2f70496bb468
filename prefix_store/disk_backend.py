"""The disk tier's backend: one file a record, in a directory that is ours alone.

Reads go through the page cache, straight to their place, from a few threads. Writes do too, unless
`direct` is set (O_DIRECT). Measured with `python -m bench.disk_io` on a shared virtual machine:
direct writes were half as fast as plain ones in one run and two to three times as fast (from 1 MiB
on) in another, and what they wrote is then read at the disk's speed, a half to a fifth of that of
the page cache. Direct reads gain about a third where nothing is cached and lose up to two thirds
where it is.

Files are not synced: after a power cut some may be torn, which a read finds and answers with "not
there". Whatever a process's end interrupts leaves a temporary file, which the next start removes.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from prefix_store.backend import Arrived, KeptBlock, OutgoingRecord
from prefix_store.base import BlockHash
from prefix_store.disk_counters import DiskCounters
from prefix_store.disk_files import DiskFiles
from prefix_store.disk_run import DiskRun
from prefix_store.disk_turns import Turns, run_to_end

THREADS = 2

T = TypeVar("T")


class DiskBackend:
    """See `Backend`. A directory is used by one store at a time; `recover` locks it.

    Calls for one block run in the order in which they came. A cancelled call ends when its thread
    has left the caller's buffers, not before."""

    def __init__(
        self, path: Path, capacity_bytes: int, *, direct: bool = False, threads: int = THREADS
    ) -> None:
        self._files = DiskFiles(path, capacity_bytes, direct)
        self._num_threads = threads
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="headstart-disk")
        self._turns = Turns()
        self._under_way = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed = False

    def __len__(self) -> int:
        """Records that are there."""
        return len(self._files)

    @property
    def counters(self) -> DiskCounters:
        return self._files.counters

    @property
    def used_bytes(self) -> int:
        """Of all files, those too that could not be removed; never more than the capacity when
        files can be removed."""
        return self._files.used_bytes

    @property
    def faults(self) -> int:
        return self._files.counters.faults

    @property
    def breaker(self) -> str:
        return ""

    def resize(self, capacity_bytes: int) -> None:
        """A new quota. Nothing goes by itself: until it fits, writes are refused."""
        self._files.capacity_bytes = capacity_bytes

    def size_of(self, record_bytes: int) -> int:
        """Exact from `recover` on, when the file system is known."""
        return self._files.size_of(record_bytes)

    async def recover(self) -> list[KeptBlock]:
        """No payload is read. What is more than the quota goes, longest unused first; the rest
        comes in the order of its last use. Raises StoreError when the directory cannot be used."""
        return await self._run([], lambda stop: self._in_thread(self._files.recover))

    async def count(self, hashes: Sequence[BlockHash]) -> int:
        return self._files.count(hashes)

    async def write(self, records: Sequence[OutgoingRecord]) -> list[bool]:
        hashes = [record.block.block_hash for record in records]
        if self._closed:
            return [False] * len(hashes)
        return await self._run(
            hashes, lambda stop: self._in_thread(lambda: self._write(records, stop))
        )

    async def read(
        self,
        hashes: Sequence[BlockHash],
        into: Sequence[memoryview],
        arrived: Arrived | None = None,
    ) -> list[KeptBlock | None]:
        if self._closed:
            return [None] * len(hashes)
        run = DiskRun(self._files, hashes, into, arrived)
        return await self._run(
            hashes, lambda stop: run.read(self._threads, self._num_threads, stop)
        )

    async def remove(self, hashes: Sequence[BlockHash]) -> None:
        if not self._closed:
            await self._run(
                hashes, lambda stop: self._in_thread(lambda: self._files.remove(hashes))
            )

    async def close(self) -> None:
        self._closed = True
        await self._idle.wait()
        self._threads.shutdown()  # idle, so nothing is waited for
        self._files.close()

    async def _run(
        self, hashes: Sequence[BlockHash], call: Callable[[threading.Event], Awaitable[T]]
    ) -> T:
        stop = threading.Event()
        self._under_way += 1
        self._idle.clear()
        try:
            return await run_to_end(self._in_turn(hashes, call, stop), stop)
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._idle.set()

    async def _in_turn(
        self,
        hashes: Sequence[BlockHash],
        call: Callable[[threading.Event], Awaitable[T]],
        stop: threading.Event,
    ) -> T:
        async with self._turns.of(hashes):
            return await call(stop)

    def _in_thread(self, work: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _write(self, records: Sequence[OutgoingRecord], stop: threading.Event) -> list[bool]:
        written: list[bool] = []
        failed: set[BlockHash] = set()
        for record in records:
            block = record.block
            done = not stop.is_set() and block.parent not in failed and self._files.write(record)
            if not done:
                failed.add(block.block_hash)  # its children would be dead bytes
            written.append(done)
        return written

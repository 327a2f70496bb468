"""The connector's half in vLLM's worker: moves the bytes.

Loads run in a thread of their own between steps; saves are copied at the end of the step that
completed the blocks and sealed in another thread. Any fault of the store is a miss.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import torch

from engine_adapter.base import EngineAdapterError
from engine_adapter.connector_orders import LoadOrder, SaveOrder, StepWork
from engine_adapter.device import BlockMover, PagedKV, Stamp, Transfer, block_mover
from prefix_store import record as records
from prefix_store.base import BlockHash, StoreError
from prefix_store.client import StoreClient
from prefix_store.events import BlocksLoaded
from prefix_store.link import StoreLink
from prefix_store.record import RecordShape

logger = logging.getLogger(__name__)

FIRST_TRY_S = 10.0
"""An engine that starts with a store there uses it from its first request on."""

LOAD_SWITCH_INTERVAL_S = 0.0002
"""Python's thread switch interval while a load is under way."""

NUM_WAITERS = 8
"""Loads that may wait at the same time for blocks on their way up from below memory."""

POLL_S = 0.001
"""Between two questions for such blocks."""

MAX_SEALING = 64
"""Saves that are copied but not yet sealed; more are not saved."""


@dataclass(frozen=True, slots=True)
class LoadResult:
    """How a load ended."""

    request_id: str
    failed_block_ids: list[int]


@dataclass(frozen=True, slots=True)
class _Sealing:
    client: StoreClient
    transfer: Transfer
    records: list[_Record]
    deadline: float
    """time.monotonic() after which the places may belong to somebody else."""
    salt: str
    request: str


@dataclass(frozen=True, slots=True)
class _Step:
    work: StepWork
    began: Stamp


@dataclass(frozen=True, slots=True)
class _Record:
    ticket: int
    block_hash: BlockHash
    block_id: int
    view: memoryview


class _ShortTurns:
    """While loads are under way, in however many threads, Python switches between threads sooner:
    the engine's loop polls meanwhile, and at the usual 5 ms copies of half a millisecond each would
    wait for it longer than they take."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loads = 0
        self._usual_s = 0.0

    def __enter__(self) -> None:
        with self._lock:
            if not self._loads:
                self._usual_s = sys.getswitchinterval()
                sys.setswitchinterval(LOAD_SWITCH_INTERVAL_S)
            self._loads += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._loads -= 1
            if not self._loads:
                sys.setswitchinterval(self._usual_s)


class WorkerHalf:
    """Owns the connection to the store and the threads that load, copy and seal; see `close`."""

    def __init__(self, socket: Path, name: str) -> None:
        self._socket = socket
        self._name = name
        self._link: StoreLink | None = None
        self._mover: BlockMover | None = None
        self._shape: RecordShape | None = None
        self._loader = _threads(1, "headstart-load")
        self._waiters = _threads(NUM_WAITERS, "headstart-wait")
        self._step: _Step | None = None
        self._sealer = _threads(1, "headstart-seal")
        self._copiers: ThreadPoolExecutor | None = None
        self._sealing = threading.BoundedSemaphore(MAX_SEALING)
        self._short_turns = _ShortTurns()
        self._results: queue.SimpleQueue[LoadResult] = queue.SimpleQueue()
        self._num_loading = 0

    def register(
        self, kv_caches: Mapping[str, torch.Tensor], num_blocks: int, block_size: int
    ) -> tuple[PagedKV, RecordShape]:
        """Take the engine's KV cache and connect to the store. Raises UnsupportedLayoutError."""
        kv = PagedKV.of(kv_caches, num_blocks)
        self._mover = block_mover(kv)
        self._copiers = _threads(self._mover.num_threads, "headstart-copy")
        self._shape = RecordShape(block_size, kv.block_bytes)
        self._link = StoreLink(self._socket, self._name, self._prepare)
        self._link.wait_first_try(FIRST_TRY_S)
        return kv, self._shape

    def start_loads(self, orders: list[LoadOrder]) -> None:
        """Begin the loads of this step; called in the engine's thread."""
        if orders and self._mover is not None:
            self._mover.mark()
        for order in orders:
            waits = order.num_in_memory < len(order.offsets)
            (self._waiters if waits else self._loader).submit(self._load, order)
        self._num_loading += len(orders)

    def begin(self, work: StepWork | None) -> None:
        """A step begins; called in the engine's thread."""
        mover = self._mover
        self._step = _Step(work, mover.stamp()) if work is not None and mover is not None else None

    def end(self) -> None:
        """The step has been computed, or everything that it takes is under way."""
        step, self._step = self._step, None
        client = self._client()
        if step is not None and client is not None and self._mover is not None:
            ended = self._mover.stamp()
            self._sealer.submit(self._guarded, self._tell_time, client, step, ended)

    def take_results(self, patience_s: float = 0.0) -> list[LoadResult]:
        """Loads that ended since the last call. Where none has, but some are under way, it waits
        for the next one as long as that; called in the engine's thread."""
        results: list[LoadResult] = []
        with contextlib.suppress(queue.Empty):
            if self._num_loading and patience_s:
                results.append(self._results.get(timeout=patience_s))
            while True:
                results.append(self._results.get_nowait())
        self._num_loading -= len(results)
        return results

    def save(self, orders: list[SaveOrder]) -> None:
        """Copy what this step completed; called in the engine's thread."""
        for order in orders:
            client = self._client()
            if client is None:
                return
            self._guarded(self._save, client, order)

    def close(self) -> None:
        """End the threads; what is under way is finished first."""
        self._loader.shutdown(wait=True)
        self._waiters.shutdown(wait=True)
        if self._copiers is not None:
            self._copiers.shutdown(wait=True)
        self._sealer.shutdown(wait=True)
        if self._link is not None:
            self._link.close()

    def _client(self) -> StoreClient | None:
        return self._link.client() if self._link is not None else None

    def _prepare(self, client: StoreClient) -> None:
        """Before a connection is used, in the link's thread. Without it copies are slower only."""
        assert self._mover is not None
        self._guarded(client.arena.populate)
        self._guarded(self._mover.adopt, client.arena.view)

    def _tell_time(self, client: StoreClient, step: _Step, ended: Stamp) -> None:
        seconds = ended.seconds_since(step.began)
        client.computed(step.work.num_tokens, step.work.attended, seconds)

    def _save(self, client: StoreClient, order: SaveOrder) -> None:
        mover, shape = self._mover, self._shape
        assert mover is not None
        assert shape is not None
        asked = time.monotonic()
        reserved = client.reserve(
            order.parent, order.is_root, order.hashes, shape.num_bytes, order.report_id
        )
        taken = [(i, place) for i, place in enumerate(reserved.places) if place is not None]
        if not taken:
            return
        if not self._sealing.acquire(blocking=False):
            client.cancel([place.ticket for _, place in taken])
            return
        try:
            parents = [order.parent, *order.hashes]
            targets = []
            for i, place in taken:
                view = client.arena.view[place.offset : place.offset + shape.num_bytes]
                records.write_header(view, order.hashes[i], parents[i], order.tokens[i], shape)
                targets.append(_Record(place.ticket, order.hashes[i], order.block_ids[i], view))
            transfer = mover.gather(
                [target.block_id for target in targets],
                [records.payload(target.view, shape) for target in targets],
            )
        except BaseException:
            self._sealing.release()
            client.cancel([place.ticket for _, place in taken])
            raise
        deadline = asked + reserved.expires_s
        sealing = _Sealing(client, transfer, targets, deadline, order.salt, order.report_id)
        self._sealer.submit(self._guarded, self._seal, sealing)

    def _seal(self, sealing: _Sealing) -> None:
        assert self._shape is not None
        try:
            sealing.transfer.wait()
            for record in sealing.records:
                if time.monotonic() >= sealing.deadline:
                    return  # this process stood still, and the places are not ours any more
                records.seal(record.view, record.block_hash, self._shape)
            tickets = [record.ticket for record in sealing.records]
            sealing.client.commit(tickets, sealing.salt, sealing.request)
        finally:
            self._sealing.release()

    def _load(self, order: LoadOrder) -> None:
        started = time.perf_counter()
        num_good = 0
        client = self._client()
        same_store = client is not None and client.welcome.incarnation == order.incarnation
        try:
            if client is not None and same_store:
                with self._short_turns:
                    num_good = self._copy_in(client, order)
        except Exception:
            logger.exception("a load failed; its tokens are computed instead")
        # Until the lease ends nothing can have changed under the copy; after it, anything can.
        if time.monotonic() >= order.deadline:
            num_good = 0
        self._results.put(LoadResult(order.request_id, order.block_ids[num_good:]))
        if client is not None:
            lease = order.lease if same_store else 0
            duration_s = time.perf_counter() - started
            self._guarded(self._report, client, order, lease, num_good, duration_s)

    def _copy_in(self, client: StoreClient, order: LoadOrder) -> int:
        """Leading blocks that are good and copied: those in memory at once, the others as they
        arrive."""
        num_there = order.num_in_memory
        num_good = self._copy_run(client, order, range(num_there))
        while num_good == num_there < len(order.offsets) and time.monotonic() < order.deadline:
            progress = client.progress(order.lease)
            arrived = min(order.num_in_memory + progress.arrived, len(order.offsets))
            if arrived > num_there:
                num_good += self._copy_run(client, order, range(num_there, arrived))
                num_there = arrived
            elif progress.done:
                break
            else:
                time.sleep(POLL_S)
        return num_good

    def _copy_run(self, client: StoreClient, order: LoadOrder, run: range) -> int:
        """Leading blocks of the run that are good and copied. Several threads take a part each;
        what lies behind a bad block may have been copied too and does not count."""
        assert self._mover is not None
        assert self._copiers is not None
        step = max(self._mover.batch_blocks, -(-len(run) // self._mover.num_threads))
        parts = [
            range(start, min(start + step, run.stop)) for start in range(run.start, run.stop, step)
        ]
        copies = [self._copiers.submit(self._copy_part, client, order, part) for part in parts]
        # For all of them, even if one fails: the blocks may be another request's soon after.
        wait(copies)
        num_good = 0
        for part, copy in zip(parts, copies, strict=True):
            good = copy.result()
            num_good += good
            if good < len(part):
                break
        return num_good

    def _copy_part(self, client: StoreClient, order: LoadOrder, part: range) -> int:
        """Leading blocks of a part that are good and copied."""
        mover, shape = self._mover, self._shape
        assert mover is not None
        assert shape is not None
        transfers = []
        num_good = 0
        try:
            for start in range(part.start, part.stop, mover.batch_blocks):
                batch = range(start, min(start + mover.batch_blocks, part.stop))
                good = self._intact(client, order, batch)
                payloads = [records.payload(source, shape) for source in good]
                block_ids = order.block_ids[start : start + len(good)]
                transfers.append(mover.scatter(payloads, block_ids))
                num_good += len(good)
                if len(good) < len(batch):
                    break
        finally:
            for transfer in transfers:
                transfer.wait()
        return num_good

    def _intact(self, client: StoreClient, order: LoadOrder, batch: range) -> list[memoryview]:
        """The leading records of the batch that are what was sealed. Checking brings a record into
        the processor's cache, from where it is copied."""
        assert self._shape is not None
        good: list[memoryview] = []
        for i in batch:
            offset = order.offsets[i]
            source = client.arena.view[offset : offset + self._shape.num_bytes]
            if not self._is_good(client, order, i, source):
                logger.warning("a stored block is damaged; it is dropped and computed instead")
                client.drop(order.hashes[i])
                break
            good.append(source)
        return good

    def _is_good(self, client: StoreClient, order: LoadOrder, i: int, record: memoryview) -> bool:
        """Whether block `i` is what was asked for and, where that is to be checked, intact."""
        assert self._shape is not None
        arriving = i - order.num_in_memory
        if arriving >= 0 and not records.is_block(
            record, order.hashes[i], order.arriving_tokens[arriving], self._shape
        ):
            return False
        if not client.welcome.verify:
            return True
        return records.is_intact(record, order.hashes[i], self._shape)

    def _report(
        self,
        client: StoreClient,
        order: LoadOrder,
        lease: int,
        num_good: int,
        duration_s: float,
    ) -> None:
        assert self._shape is not None
        num_disk = max(0, min(num_good - order.num_in_memory, order.from_disk))
        num_redis = max(0, num_good - order.num_in_memory - order.from_disk)
        loaded = BlocksLoaded(
            order.report_id,
            num_good * self._shape.num_tokens,
            len(order.offsets) * self._shape.num_tokens,
            num_good * self._shape.payload_bytes,
            duration_s,
            order.preempted,
            disk_tokens=num_disk * self._shape.num_tokens,
            redis_tokens=num_redis * self._shape.num_tokens,
        )
        client.release(lease, loaded)

    def _guarded(self, function: Callable[..., None], *args: object) -> None:
        """The outermost boundary of work that the engine must not suffer from."""
        try:
            function(*args)
        except (StoreError, EngineAdapterError) as error:
            logger.warning("%s", error)
        except Exception:
            logger.exception("the connector failed; its blocks are computed when they are needed")


def _threads(count: int, name: str) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix=name, initializer=_spread_out)


def _spread_out() -> None:
    """vLLM binds a CPU worker's main thread to one core, and threads inherit that: copies would
    share this core with one another and with the engine's loop. Ours may run where the engine's
    parent process may."""
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))

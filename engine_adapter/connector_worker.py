"""The connector's half in vLLM's worker: moves the bytes.

Loads run in a thread of their own between steps; saves are copied at the end of the step that
completed the blocks and sealed in another thread. Any fault of the store is a miss.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from engine_adapter.base import EngineAdapterError
from engine_adapter.connector_orders import LoadOrder, SaveOrder
from engine_adapter.device import BlockMover, PagedKV, Transfer, block_mover
from prefix_store import record as records
from prefix_store.base import BlockHash, StoreError
from prefix_store.client import StoreClient
from prefix_store.events import BlocksLoaded
from prefix_store.link import StoreLink
from prefix_store.record import RecordShape

logger = logging.getLogger(__name__)

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
    records: list[memoryview]
    offsets: list[int]
    salt: str


class WorkerHalf:
    """Owns two threads; `close` ends them."""

    def __init__(self, link: StoreLink) -> None:
        self._link = link
        self._kv: PagedKV | None = None
        self._mover: BlockMover | None = None
        self._shape: RecordShape | None = None
        self._adopted: StoreClient | None = None
        self._adopting = threading.Lock()
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="headstart-load")
        self._sealer = ThreadPoolExecutor(1, thread_name_prefix="headstart-seal")
        self._sealing = threading.BoundedSemaphore(MAX_SEALING)
        self._results: queue.SimpleQueue[LoadResult] = queue.SimpleQueue()

    def register(
        self, kv_caches: Mapping[str, torch.Tensor], num_blocks: int, block_size: int
    ) -> tuple[PagedKV, RecordShape]:
        """Take the engine's KV cache. Raises UnsupportedLayoutError."""
        kv = PagedKV.of(kv_caches, num_blocks)
        self._kv = kv
        self._mover = block_mover(kv)
        self._shape = RecordShape(block_size, kv.block_bytes)
        return kv, self._shape

    def start_loads(self, orders: list[LoadOrder]) -> None:
        """Begin the loads of this step; called in the engine's thread."""
        if orders and self._mover is not None:
            self._mover.mark()
        for order in orders:
            self._loader.submit(self._load, order)

    def take_results(self) -> list[LoadResult]:
        """Loads that ended since the last call."""
        results = []
        while True:
            try:
                results.append(self._results.get_nowait())
            except queue.Empty:
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
        self._sealer.shutdown(wait=True)

    def _client(self) -> StoreClient | None:
        client = self._link.client()
        if client is None or self._mover is None:
            return None
        with self._adopting:
            if client is not self._adopted:
                self._adopted = client
                # Without pinned memory copies are slower, not wrong.
                self._guarded(self._mover.adopt, client.arena.view)
        return client

    def _save(self, client: StoreClient, order: SaveOrder) -> None:
        mover, shape = self._mover, self._shape
        assert mover is not None
        assert shape is not None
        places = client.reserve(order.parent, order.is_root, order.hashes, shape.num_bytes)
        parents: list[BlockHash] = [order.parent, *order.hashes]
        block_ids, targets, offsets = [], [], []
        for i, offset in enumerate(places):
            if offset is None:
                continue
            target = client.arena.view[offset : offset + shape.num_bytes]
            records.write_header(target, order.hashes[i], parents[i], order.tokens[i], shape)
            block_ids.append(order.block_ids[i])
            targets.append(target)
            offsets.append(offset)
        if not offsets:
            return
        if not self._sealing.acquire(blocking=False):
            client.cancel(offsets)
            return
        try:
            transfer = mover.gather(block_ids, [records.payload(t, shape) for t in targets])
        except BaseException:
            self._sealing.release()
            client.cancel(offsets)
            raise
        self._sealer.submit(
            self._guarded, self._seal, _Sealing(client, transfer, targets, offsets, order.salt)
        )

    def _seal(self, sealing: _Sealing) -> None:
        assert self._shape is not None
        try:
            sealing.transfer.wait()
            for target in sealing.records:
                records.seal(target, self._shape)
            sealing.client.commit(sealing.offsets, sealing.salt)
        finally:
            self._sealing.release()

    def _load(self, order: LoadOrder) -> None:
        started = time.perf_counter()
        num_good = 0
        client = None
        try:
            client = self._client()
            if client is not None and client.welcome.incarnation == order.incarnation:
                num_good = self._copy_in(client, order)
        except Exception:
            logger.exception("a load failed; its tokens are computed instead")
        # Until the lease ends nothing can have changed under the copy; after it, anything can.
        if time.monotonic() >= order.deadline:
            num_good = 0
        self._results.put(LoadResult(order.request_id, order.block_ids[num_good:]))
        if client is not None:
            self._guarded(self._report, client, order, num_good, time.perf_counter() - started)

    def _copy_in(self, client: StoreClient, order: LoadOrder) -> int:
        """Leading blocks that are good and copied."""
        mover, shape = self._mover, self._shape
        assert mover is not None
        assert shape is not None
        verify = client.welcome.verify
        transfers = []
        num_good = 0
        for i, offset in enumerate(order.offsets):
            source = client.arena.view[offset : offset + shape.num_bytes]
            # Checking brings the record into the processor's cache, from where it is copied.
            if verify and not records.is_intact(source, shape):
                logger.warning("a stored block is damaged; it is dropped and computed instead")
                client.drop(order.hashes[i])
                break
            transfers.append(mover.scatter([records.payload(source, shape)], [order.block_ids[i]]))
            num_good = i + 1
        for transfer in transfers:
            transfer.wait()
        return num_good

    def _report(
        self, client: StoreClient, order: LoadOrder, num_good: int, duration_s: float
    ) -> None:
        assert self._shape is not None
        loaded = BlocksLoaded(
            order.report_id,
            num_good * self._shape.num_tokens,
            len(order.offsets) * self._shape.num_tokens,
            num_good * self._shape.payload_bytes,
            duration_s,
            order.preempted,
        )
        client.release(order.lease, loaded)

    def _guarded(self, function: Callable[..., None], *args: object) -> None:
        """The outermost boundary of work that the engine must not suffer from."""
        try:
            function(*args)
        except (StoreError, EngineAdapterError) as error:
            logger.warning("%s", error)
        except Exception:
            logger.exception("the connector failed; its blocks are computed when they are needed")

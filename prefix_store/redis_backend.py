"""The Redis tier's backend: blocks that several stores share, on a Redis or Valkey server.

A store refers to a block before it writes it, and ends that after it has removed it, so the
references are never less than the truth, whenever it is killed. A block that another store has
written already is referred to as well and counts in full: a quota then holds without asking who
else keeps a block, and what a store has to remember is bounded by it. Only the writer of a block
(it has signed the footer) removes it; the others merely end their reference.

Blocks expire (`ttl_s`) unless a store that refers to them prolongs that, so nothing of a store
that never comes back stays. Keys: redis_keyspace.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

from prefix_store.backend import Arrived, KeptBlock, OutgoingRecord
from prefix_store.base import BlockHash, StoreUnavailableError
from prefix_store.offers import slices
from prefix_store.redis_faults import RedisCounters, address_of
from prefix_store.redis_keyspace import Put, RedisKeyspace
from prefix_store.redis_leftovers import LINGER_S, Leftovers
from prefix_store.redis_link import RedisLink
from prefix_store.redis_run import RedisRun
from prefix_store.redis_value import charged_bytes, close_value

TTL_S = 24 * 3600.0
STRETCH_BYTES = 32 * 1024**2
"""Of records that are read in one go; then others have their turn."""
SLICE_KEYS = 256
"""In a round without records, unless it has to be one."""
RECOVER_S = 2.0
"""More time for each round of the recovery: the server may just have started."""
SWEEP_EVERY_S = 1.0
PROLONG_PAUSE_S = 0.02
"""Between the rounds that prolong all blocks."""

T = TypeVar("T")


class RedisBackend:
    """See `Backend`. `recover` may be called again after it has raised StoreUnavailableError;
    until it has worked nothing is written, while `count` and `read` work."""

    def __init__(
        self,
        url: str,
        store_id: str,
        *,
        timeout_s: float = 0.05,
        prefix: str = "hs1",
        ttl_s: float = TTL_S,
        linger_s: float = LINGER_S,
    ) -> None:
        """`store_id`: the same after a restart, and of no other store. Raises StoreError for an
        impossible URL."""
        self._link = RedisLink(url, timeout_s)
        self._keys = RedisKeyspace(self._link, prefix, store_id, ttl_s)
        self._address = address_of(url)
        self._ttl_s = ttl_s
        self._recovered = False
        self._leftovers = Leftovers(self._keys, time.monotonic, linger_s)
        self._keeping: asyncio.Task[None] | None = None

    @property
    def counters(self) -> RedisCounters:
        return self._link.counters

    @property
    def faults(self) -> int:
        return self._link.counters.faults

    @property
    def breaker(self) -> str:
        return self._link.breaker

    @property
    def is_available(self) -> bool:
        """Whether a write would be tried now."""
        return self._recovered and self._link.is_up

    def resize(self, capacity_bytes: int) -> None:
        """The tier above counts; there is nothing to tell the server."""
        del capacity_bytes

    def size_of(self, record_bytes: int) -> int:
        return charged_bytes(record_bytes)

    async def recover(self) -> list[KeptBlock]:
        self._link.start()
        found: dict[BlockHash, KeptBlock] = {}
        gone: set[BlockHash] = set()
        cursor: int | None = None
        while cursor != 0:
            page = await self._keys.references(cursor or 0, RECOVER_S)
            for part in _parts(page.entries if page else (), SLICE_KEYS):
                blocks = await self._keys.look(part, RECOVER_S)
                if blocks is None:
                    raise self._unusable()
                gone.update(BlockHash(block_hash) for block_hash, _ in part)
                found.update({block.block_hash: block for block in blocks if block is not None})
            if page is None:
                raise self._unusable()
            cursor = page.next_cursor
        ordered = _parents_first(found)
        gone.difference_update(block.block_hash for block in ordered)
        self._recovered = True
        self._leftovers.add(gone)
        await self._leftovers.settle()
        if self._keeping is None:
            self._keeping = asyncio.get_running_loop().create_task(self._keep())
        self.counters.records_recovered = len(ordered)
        return ordered

    async def count(self, hashes: Sequence[BlockHash]) -> int:
        there = await self._keys.exist(hashes)
        return next((i for i, one in enumerate(there) if not one), len(there))

    async def write(self, records: Sequence[OutgoingRecord]) -> list[bool]:
        written: list[bool] = []
        begun: list[BlockHash] = []
        try:
            for part in slices(records, lambda record: len(record.data)):
                hashes = [record.block.block_hash for record in part]
                if not self.is_available or not await self._leftovers.claim(hashes):
                    break
                begun += hashes
                done = await self._write(part)
                written += done
                if not any(done):
                    break
        except asyncio.CancelledError:
            # The caller does not learn what was written, so it does not count it either.
            self._leftovers.suspect(begun)
            raise
        return written + [False] * (len(records) - len(written))

    async def read(
        self,
        hashes: Sequence[BlockHash],
        into: Sequence[memoryview],
        arrived: Arrived | None = None,
    ) -> list[KeptBlock | None]:
        run = RedisRun(hashes, into, arrived)
        wanted = list(zip(hashes, into, strict=True))
        for part in slices(wanted, lambda pair: len(pair[1]), STRETCH_BYTES):
            if not await self._keys.get([h for h, _ in part], [b for _, b in part], run.landed):
                break
        run.tell()
        there = [block for block in run.blocks if block is not None]
        self.counters.records_read += len(there)
        self.counters.bytes_read += sum(block.record_bytes for block in there)
        await self._discard(run.damaged)
        return run.blocks

    async def remove(self, hashes: Sequence[BlockHash]) -> None:
        if hashes:
            self._leftovers.add(hashes)
            await self._leftovers.settle()

    async def close(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
            self._keeping = None
        await self._leftovers.settle()
        await self._link.close()

    def _unusable(self) -> StoreUnavailableError:
        return StoreUnavailableError(
            f"the Redis tier at {self._address} (store.redis.url) cannot be used; see the log"
        )

    async def _write(self, records: Sequence[OutgoingRecord]) -> list[bool]:
        """One slice."""
        hashes = [record.block.block_hash for record in records]
        if not await self._keys.refer(records):
            self._leftovers.add(hashes)
            return [False] * len(records)
        values = [close_value(record, self._keys.owner) for record in records]
        outcomes = await self._keys.put(hashes, values)
        if outcomes is None:
            self._leftovers.suspect(hashes)
            return [False] * len(records)
        there = [outcome is Put.WRITTEN for outcome in outcomes]
        self.counters.records_written += sum(there)
        self.counters.bytes_written += sum(
            len(record.data) for record, ok in zip(records, there, strict=True) if ok
        )
        asked = [i for i, outcome in enumerate(outcomes) if outcome is Put.FOUND]
        found = await self._find([records[i] for i in asked])
        for i, ok in zip(asked, found, strict=True):
            there[i] = ok
        self._leftovers.add([h for h, ok in zip(hashes, there, strict=True) if not ok])
        return there

    async def _find(self, records: Sequence[OutgoingRecord]) -> list[bool]:
        found = await self._keys.find(records)
        if found is None:
            return [False] * len(records)
        self.counters.records_found += sum(found)
        hashes = [record.block.block_hash for record in records]
        await self._discard([h for h, ok in zip(hashes, found, strict=True) if not ok])
        return found

    async def _discard(self, hashes: Sequence[BlockHash]) -> None:
        """Remove what is not whole, whoever wrote it."""
        self.counters.records_damaged += len(hashes)
        self._leftovers.add(hashes)
        for part in _parts(hashes, SLICE_KEYS):
            await self._keys.unlink(part)

    async def _keep(self) -> None:
        """Remove what is left over, and prolong what is referred to four times in its life."""
        loop = asyncio.get_running_loop()
        prolong_at = loop.time() + self._ttl_s / 4
        while True:
            await asyncio.sleep(min(SWEEP_EVERY_S, self._ttl_s / 8))
            await self._leftovers.sweep()
            if self._link.is_up and loop.time() >= prolong_at and await self._prolong():
                prolong_at = loop.time() + self._ttl_s / 4

    async def _prolong(self) -> bool:
        cursor: int | None = None
        while cursor != 0:
            page = await self._keys.references(cursor or 0)
            if page is None:
                return False
            for part in _parts(page.entries, SLICE_KEYS):
                await self._keys.prolong([block_hash for block_hash, _ in part])
                await asyncio.sleep(PROLONG_PAUSE_S)
            cursor = page.next_cursor
        return True


def _parents_first(found: dict[BlockHash, KeptBlock]) -> list[KeptBlock]:
    """Blocks that hang together with the start of a prompt."""
    children: dict[BlockHash | None, list[KeptBlock]] = {}
    for block in found.values():
        children.setdefault(block.parent, []).append(block)
    ordered = list(children.get(None, ()))
    for block in ordered:  # grows meanwhile
        ordered += children.get(block.block_hash, ())
    return ordered


def _parts(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for at in range(0, len(items), size):
        yield items[at : at + size]

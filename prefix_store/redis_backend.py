"""The Redis tier's backend: blocks that several stores share, on a Redis or Valkey server.

Keys, with the prefix (default `hs1`):

    hs1:b:<block hash>     a block: record, salt and footer (redis_value.py)
    hs1:refs:<store id>    what one store counts as its own: a hash, block hash -> Reference

A store refers to a block before it writes it, and ends that after it has removed it, so the
references are never less than the truth, whenever it is killed. A block that another store has
written already is referred to as well and counts in full: a quota then holds without asking who
else keeps a block, and what a store has to remember is bounded by it. Only the writer of a block
(it has signed the footer) removes it; the others merely end their reference.

Blocks expire (`ttl_s`) unless a store that refers to them prolongs that, so nothing of a store
that never comes back stays.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from prefix_store.backend import KeptBlock, OutgoingRecord
from prefix_store.base import BlockHash, StoreUnavailableError
from prefix_store.redis_faults import RedisCounters, address_of
from prefix_store.redis_link import Command, RedisLink
from prefix_store.redis_value import (
    FOOTER_BYTES,
    Reference,
    charged_bytes,
    close_value,
    open_value,
    owner_of,
    read_ends,
    read_footer,
    reference_of,
)

TTL_S = 24 * 3600.0
SLICE_BYTES = 4 * 1024**2
"""Of records in one round."""
SLICE_KEYS = 256
"""In a round without records, where order or size may be large."""
RECOVER_S = 10.0
"""More time for each round of the recovery: the server may just have started."""
SETTLE_EVERY_S = 1.0
PROLONG_PAUSE_S = 0.02
"""Between the rounds that prolong all blocks."""

T = TypeVar("T")

logger = logging.getLogger(__name__)


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
    ) -> None:
        self._link = RedisLink(url, timeout_s)
        self._address = address_of(url)
        self._owner = owner_of(store_id)
        self._blocks = f"{prefix}:b:".encode()
        self._references = f"{prefix}:refs:{store_id}".encode()
        self._ttl_s = ttl_s
        self._ttl_ms = max(1, int(ttl_s * 1000))
        self._recovered = False
        self._doubtful: set[BlockHash] = set()
        """Not ours by our own account, but perhaps there: the link broke in the middle."""
        self._settling = asyncio.Lock()
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
        gone: list[BlockHash] = []
        cursor = 0
        while True:
            answers = await self._patient([("HSCAN", self._references, cursor, "COUNT", 256)])
            cursor, entries = answers[0]
            for part in _parts(list(entries.items()), SLICE_KEYS):
                for block_hash, block in zip(part, await self._look(part), strict=True):
                    if block is None:
                        gone.append(BlockHash(block_hash[0]))
                    else:
                        found[block.block_hash] = block
            if cursor == 0:
                break
        ordered = _parents_first(found)
        gone += found.keys() - {block.block_hash for block in ordered}
        self._recovered = True
        self._doubtful.update(gone)
        await self._settle()
        if self._keeping is None:
            self._keeping = asyncio.get_running_loop().create_task(self._keep())
        self.counters.records_recovered = len(ordered)
        return ordered

    async def count(self, hashes: Sequence[BlockHash]) -> int:
        answers = await self._link.round([("EXISTS", self._key(each)) for each in hashes])
        for i, answer in enumerate(answers or ()):
            if answer != 1:
                return i
        return len(answers or ())

    async def write(self, records: Sequence[OutgoingRecord]) -> list[bool]:
        written: list[bool] = []
        for part in _slices(records, [len(record.data) for record in records]):
            if not self.is_available or not await self._settle():
                break
            done = await self._write(part)
            written += done
            if not any(done):
                break
        return written + [False] * (len(records) - len(written))

    async def read(
        self, hashes: Sequence[BlockHash], into: Sequence[memoryview]
    ) -> list[KeptBlock | None]:
        blocks: list[KeptBlock | None] = []
        damaged: list[BlockHash] = []
        wanted = list(zip(hashes, into, strict=True))
        for part in _slices(wanted, [len(buffer) for buffer in into]):
            num_bytes = sum(len(buffer) for _, buffer in part)
            commands: list[Command] = [("GET", self._key(each)) for each, _ in part]
            answers = await self._link.round(commands, num_bytes)
            if answers is None:
                break
            for (block_hash, buffer), value in zip(part, answers, strict=True):
                block = self._take(block_hash, value, buffer)
                blocks.append(block)
                if block is None and isinstance(value, bytes):
                    damaged.append(block_hash)
        if damaged:
            self.counters.records_damaged += len(damaged)
            await self._unlink(damaged)
        return blocks + [None] * (len(hashes) - len(blocks))

    async def remove(self, hashes: Sequence[BlockHash]) -> None:
        if hashes:
            self._doubtful.update(hashes)
            await self._settle()

    async def close(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
            self._keeping = None
        if self._link.is_up:
            await self._settle()
        await self._link.close()

    def _key(self, block_hash: bytes) -> bytes:
        return self._blocks + block_hash.hex().encode()

    def _take(self, block_hash: BlockHash, value: Any, buffer: memoryview) -> KeptBlock | None:
        if not isinstance(value, bytes):
            return None
        block = open_value(memoryview(value), block_hash, len(buffer))
        if block is not None:
            buffer[:] = memoryview(value)[: len(buffer)]
            self.counters.records_read += 1
            self.counters.bytes_read += len(buffer)
        return block

    async def _write(self, records: Sequence[OutgoingRecord]) -> list[bool]:
        """One slice. What may have been written when the link breaks is doubtful."""
        values = [close_value(record, self._owner) for record in records]
        num_bytes = sum(len(value) for value in values if value is not None)
        hashes = [record.block.block_hash for record in records]
        pending = set(hashes)
        try:
            if not await self._refer(records):
                return [False] * len(records)
            commands: list[Command] = [
                ("SET", self._key(block_hash), value or b"", "NX", "PX", self._ttl_ms)
                for block_hash, value in zip(hashes, values, strict=True)
                if value is not None
            ]
            answers = await self._link.round(commands, num_bytes)
            if answers is None:
                return [False] * len(records)
            answer_of = iter(answers)
            outcomes = [None if value is None else next(answer_of) for value in values]
            there = [outcome is True for outcome in outcomes]
            for record, new in zip(records, there, strict=True):
                self.counters.records_written += new
                self.counters.bytes_written += len(record.data) if new else 0
            asked = [i for i, value in enumerate(values) if value and outcomes[i] is None]
            found = await self._find([records[i] for i in asked])
            for i, ok in zip(asked, found, strict=True):
                there[i] = ok
            pending.difference_update(h for h, ok in zip(hashes, there, strict=True) if ok)
            return there
        finally:
            self._doubtful |= pending

    async def _refer(self, records: Sequence[OutgoingRecord]) -> bool:
        """Refer to blocks that are about to be written."""
        pairs: list[bytes] = []
        for record in records:
            pairs += (record.block.block_hash, reference_of(record).pack())
        answers = await self._link.round(
            [
                ("HSET", self._references, *pairs),
                ("PEXPIRE", self._references, 2 * self._ttl_ms),
            ]
        )
        return answers is not None and isinstance(answers[0], int)

    async def _find(self, records: Sequence[OutgoingRecord]) -> list[bool]:
        """Whether blocks that seem to be there already are whole, as far as their ends tell."""
        commands: list[Command] = []
        for record in records:
            key = self._key(record.block.block_hash)
            size = reference_of(record)
            commands += (
                ("STRLEN", key),
                ("GETRANGE", key, 0, size.head_bytes - 1),
                ("GETRANGE", key, size.record_bytes, -1),
                ("PEXPIRE", key, self._ttl_ms),
            )
        answers = await self._link.round(commands)
        if answers is None:
            return [False] * len(records)
        found: list[bool] = []
        for i, record in enumerate(records):
            length, head, tail, _ = answers[4 * i : 4 * i + 4]
            whole = (
                length == reference_of(record).value_bytes
                and read_ends(memoryview(head), memoryview(tail), record.block.block_hash)
                is not None
            )
            found.append(whole)
        self.counters.records_found += sum(found)
        broken = [r.block.block_hash for r, ok in zip(records, found, strict=True) if not ok]
        await self._unlink(broken)
        return found

    async def _unlink(self, hashes: Sequence[BlockHash]) -> None:
        """Remove what is not whole, whoever wrote it."""
        for part in _parts(hashes, SLICE_KEYS):
            await self._link.round([("UNLINK", self._key(each)) for each in part])
        self._doubtful.update(hashes)

    async def _settle(self) -> bool:
        """Make sure that doubtful blocks are gone, or not ours; True when none is left."""
        async with self._settling:
            for part in _parts(list(self._doubtful), SLICE_KEYS):
                if not await self._forget(part):
                    return False
                self._doubtful.difference_update(part)
            return True

    async def _forget(self, hashes: Sequence[BlockHash]) -> bool:
        """Remove those that this store wrote, then end all the references."""
        keys = [self._key(each) for each in hashes]
        ends = await self._link.round([("GETRANGE", key, -FOOTER_BYTES, -1) for key in keys])
        if ends is None or not all(isinstance(end, bytes) for end in ends):
            return False
        ours: list[Command] = [
            ("UNLINK", key)
            for key, end in zip(keys, ends, strict=True)
            if (footer := read_footer(end)) is not None and footer.owner == self._owner
        ]
        removed = await self._link.round(ours)
        if removed is None or not all(isinstance(each, int) for each in removed):
            return False
        ended = await self._link.round([("HDEL", self._references, *hashes)])
        return ended is not None and isinstance(ended[0], int)

    async def _look(self, entries: Sequence[tuple[bytes, bytes]]) -> list[KeptBlock | None]:
        """The blocks that references name, from the ends of their values."""
        commands: list[Command] = []
        references: list[Reference] = []
        for block_hash, raw in entries:
            reference = Reference.unpack(raw) or Reference(0, 0, 0)
            key = self._key(block_hash)
            references.append(reference)
            commands += (
                ("STRLEN", key),
                ("GETRANGE", key, 0, max(0, reference.head_bytes - 1)),
                ("GETRANGE", key, reference.record_bytes, -1),
            )
        # A value that is not the one referred to could be long: look at its length first.
        lengths = await self._patient(commands[::3])
        right = [
            length == reference.value_bytes and length > 0
            for length, reference in zip(lengths, references, strict=True)
        ]
        ends = iter(
            await self._patient([c for i, c in enumerate(commands) if i % 3 and right[i // 3]])
        )
        return [
            read_ends(memoryview(next(ends)), memoryview(next(ends)), BlockHash(block_hash))
            if ok
            else None
            for (block_hash, _), ok in zip(entries, right, strict=True)
        ]

    async def _patient(self, commands: Sequence[Command]) -> list[Any]:
        answers = await self._link.round(commands, patience_s=RECOVER_S)
        if answers is None or any(not isinstance(a, (int, bytes, tuple, list)) for a in answers):
            raise StoreUnavailableError(
                f"the Redis tier at {self._address} (store.redis.url) cannot be used; see the log"
            )
        return answers

    async def _keep(self) -> None:
        """Settle what is doubtful, and prolong what is referred to four times in its life."""
        loop = asyncio.get_running_loop()
        prolong_at = loop.time() + self._ttl_s / 4
        while True:
            await asyncio.sleep(min(SETTLE_EVERY_S, self._ttl_s / 8))
            if not self._link.is_up:
                continue
            if self._doubtful:
                await self._settle()
            if loop.time() >= prolong_at and await self._prolong():
                prolong_at = loop.time() + self._ttl_s / 4

    async def _prolong(self) -> bool:
        cursor = 0
        while True:
            answers = await self._link.round(
                [
                    ("HSCAN", self._references, cursor, "COUNT", SLICE_KEYS),
                    ("PEXPIRE", self._references, 2 * self._ttl_ms),
                ]
            )
            if answers is None or not isinstance(answers[0], (tuple, list)):
                return False
            cursor, entries = answers[0]
            for part in _parts(list(entries), SLICE_KEYS):
                await self._link.round([("PEXPIRE", self._key(h), self._ttl_ms) for h in part])
                await asyncio.sleep(PROLONG_PAUSE_S)
            if cursor == 0:
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


def _slices(items: Sequence[T], sizes: Sequence[int]) -> Iterator[list[T]]:
    """As many at a time as SLICE_BYTES allow, at least one."""
    batch: list[T] = []
    num_bytes = 0
    for item, size in zip(items, sizes, strict=True):
        if batch and num_bytes + size > SLICE_BYTES:
            yield batch
            batch, num_bytes = [], 0
        batch.append(item)
        num_bytes += size
    if batch:
        yield batch

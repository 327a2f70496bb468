"""The keys of the Redis tier, and the rounds of commands over them.

With the prefix (default `hs1`):

    hs1:b:<block hash>     a block: record, salt and footer (redis_value.py)
    hs1:refs:<store id>    what one store counts as its own: a hash, block hash -> Reference
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from prefix_store.backend import KeptBlock, OutgoingRecord
from prefix_store.base import BlockHash
from prefix_store.offers import slices
from prefix_store.redis_fetch import Reply, reply_of
from prefix_store.redis_link import Command, RedisLink
from prefix_store.redis_value import (
    FOOTER_BYTES,
    Reference,
    owner_of,
    read_ends,
    read_footer,
    reference_of,
)


class Put(Enum):
    """What became of a block that was to be written."""

    WRITTEN = auto()
    FOUND = auto()
    """There was something already."""
    REFUSED = auto()


SCAN_COUNT = 256
"""Entries that the server looks at in one step."""


@dataclass(frozen=True, slots=True)
class ReferencePage:
    """Some of a store's references."""

    next_cursor: int
    """0: that were the last ones."""
    entries: Sequence[tuple[bytes, bytes]]
    """Block hash and packed reference."""


class RedisKeyspace:
    """Each method is one round trip unless it says otherwise; None or False: no usable answer."""

    def __init__(self, link: RedisLink, prefix: str, store_id: str, ttl_s: float) -> None:
        self.owner = owner_of(store_id)
        self._link = link
        self._blocks = f"{prefix}:b:".encode()
        self._references = f"{prefix}:refs:{store_id}".encode()
        self._ttl_ms = max(1, int(ttl_s * 1000))

    async def exist(self, hashes: Sequence[BlockHash]) -> list[bool]:
        answers = await self._link.round([("EXISTS", self._key(each)) for each in hashes])
        return [answer == 1 for answer in answers or ()]

    async def get(
        self,
        hashes: Sequence[BlockHash],
        into: Sequence[memoryview],
        landed: Callable[[Reply], None],
    ) -> bool:
        """Values into buffers, in a stream; `landed` hears of each as it comes. False: the rest
        did not come. From a cluster they come in rounds."""
        if self._link.can_fetch:
            return await self._link.fetch([self._key(each) for each in hashes], into, landed)
        wanted = zip(hashes, into, strict=True)
        for part in slices(list(wanted), lambda pair: len(pair[1])):
            values = await self._link.round(
                [("GET", self._key(block_hash)) for block_hash, _ in part],
                sum(len(buffer) for _, buffer in part),
            )
            if values is None:
                return False
            for (_, buffer), value in zip(part, values, strict=True):
                landed(reply_of(value, buffer))
        return True

    async def put(
        self, hashes: Sequence[BlockHash], values: Sequence[bytes | None]
    ) -> list[Put] | None:
        """None: nobody knows which of them were written, or will be. A value that is None is not
        written."""
        commands: list[Command] = [
            ("SET", self._key(block_hash), value, "NX", "PX", self._ttl_ms)
            for block_hash, value in zip(hashes, values, strict=True)
            if value is not None
        ]
        num_bytes = sum(len(value) for value in values if value is not None)
        answers = await self._link.round(commands, num_bytes)
        if answers is None:
            return None
        answer_of = iter(answers)
        return [Put.REFUSED if value is None else _outcome(next(answer_of)) for value in values]

    async def refer(self, records: Sequence[OutgoingRecord]) -> bool:
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

    async def find(self, records: Sequence[OutgoingRecord]) -> list[bool] | None:
        """Whether blocks that were there already are whole, as far as their ends tell. Prolongs
        them."""
        commands: list[Command] = []
        for record in records:
            key, reference = self._key(record.block.block_hash), reference_of(record)
            commands += (
                ("STRLEN", key),
                *self._ends(key, reference),
                ("PEXPIRE", key, self._ttl_ms),
            )
        answers = await self._link.round(commands)
        if answers is None:
            return None
        return [
            answers[4 * i] == reference_of(record).value_bytes
            and _block(answers[4 * i + 1 : 4 * i + 3], record.block.block_hash) is not None
            for i, record in enumerate(records)
        ]

    async def unlink(self, hashes: Sequence[BlockHash]) -> bool:
        """Remove blocks, whoever wrote them."""
        answers = await self._link.round([("UNLINK", self._key(each)) for each in hashes])
        return answers is not None and all(isinstance(each, int) for each in answers)

    async def unlink_ours(self, hashes: Sequence[BlockHash]) -> bool:
        """Remove the blocks that this store wrote: two rounds."""
        ends = await self._link.round(
            [("GETRANGE", self._key(each), -FOOTER_BYTES, -1) for each in hashes]
        )
        if ends is None or not all(isinstance(end, bytes) for end in ends):
            return False
        footers = [read_footer(end) for end in ends]
        return await self.unlink(
            [
                block_hash
                for block_hash, footer in zip(hashes, footers, strict=True)
                if footer is not None and footer.owner == self.owner
            ]
        )

    async def end(self, hashes: Sequence[BlockHash]) -> bool:
        """End references."""
        answers = await self._link.round([("HDEL", self._references, *hashes)])
        return answers is not None and isinstance(answers[0], int)

    async def references(self, cursor: int, patience_s: float = 0.0) -> ReferencePage | None:
        """The next ones, and a longer life for the list of them."""
        answers = await self._link.round(
            [
                ("HSCAN", self._references, cursor, "COUNT", SCAN_COUNT),
                ("PEXPIRE", self._references, 2 * self._ttl_ms),
            ],
            patience_s=patience_s,
        )
        if answers is None or not isinstance(answers[0], (tuple, list)):
            return None
        next_cursor, entries = answers[0]
        return ReferencePage(int(next_cursor), list(entries.items()))

    async def look(
        self, entries: Sequence[tuple[bytes, bytes]], patience_s: float
    ) -> list[KeptBlock | None] | None:
        """The blocks that references name, from the ends of their values: two rounds, since a
        value that is not the one referred to could be long."""
        references = [Reference.unpack(raw) for _, raw in entries]
        keys = [self._key(block_hash) for block_hash, _ in entries]
        lengths = await self._link.round([("STRLEN", key) for key in keys], 0, patience_s)
        if lengths is None:
            return None
        right = [
            reference is not None and length == reference.value_bytes
            for length, reference in zip(lengths, references, strict=True)
        ]
        commands: list[Command] = []
        for key, reference, ok in zip(keys, references, right, strict=True):
            if reference is not None and ok:
                commands += self._ends(key, reference)
        answers = await self._link.round(commands, 0, patience_s)
        if answers is None:
            return None
        ends = iter(answers)
        return [
            _block((next(ends), next(ends)), BlockHash(block_hash)) if ok else None
            for (block_hash, _), ok in zip(entries, right, strict=True)
        ]

    async def prolong(self, hashes: Sequence[bytes]) -> None:
        await self._link.round([("PEXPIRE", self._key(each), self._ttl_ms) for each in hashes])

    def _key(self, block_hash: bytes) -> bytes:
        return self._blocks + block_hash.hex().encode()

    def _ends(self, key: bytes, reference: Reference) -> tuple[Command, Command]:
        return (
            ("GETRANGE", key, 0, reference.head_bytes - 1),
            ("GETRANGE", key, reference.record_bytes, -1),
        )


def _outcome(answer: Any) -> Put:
    if answer is None:
        return Put.FOUND
    return Put.WRITTEN if answer is True else Put.REFUSED


def _block(ends: Sequence[Any], block_hash: BlockHash) -> KeptBlock | None:
    head, tail = ends
    if not isinstance(head, bytes) or not isinstance(tail, bytes):
        return None
    return read_ends(memoryview(head), memoryview(tail), block_hash)

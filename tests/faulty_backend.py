"""A backend in plain memory that fails when it is told to, for tests of what lies above it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from prefix_store.backend import Arrived, KeptBlock, OutgoingRecord
from prefix_store.base import BlockHash, StoreUnavailableError
from prefix_store.disk_turns import Turns

READ_AT_ONCE = 2
"""Records; then others come first."""

EXTRA_BYTES = 16
"""What keeping a record costs beyond its own bytes."""


@dataclass
class Faults:
    """What goes wrong, until it is changed again."""

    is_down: bool = False
    """Nothing is written, nothing is read, and the circuit breaker is open."""
    refuse_writes: int = 0
    """So many of the next records are not written."""
    lose_reads: int = 0
    """So many of the next records are torn."""
    fail_reads: int = 0
    """So many of the next reads fail for a fault of the medium; the records stay."""


@dataclass
class FaultyBackend:
    """See `Backend`. Calls for one block run in the order in which they came. `peak_bytes` is the
    most that ever lay here."""

    faults_to_come: Faults = field(default_factory=Faults)
    records: dict[BlockHash, tuple[KeptBlock, bytes]] = field(default_factory=dict)
    peak_bytes: int = 0
    faults: int = 0
    num_writes: int = 0
    num_reads: int = 0
    pause: Callable[[str], None] | None = None
    """Called in the middle of every call with its name."""
    delays: Sequence[int] = (1,)
    """How often others come before a call, one call after another."""
    _calls: int = 0
    _turns: Turns = field(default_factory=Turns)
    gate: asyncio.Event | None = None
    """Reads wait for it, if there is one."""

    @property
    def breaker(self) -> str:
        return "open" if self.faults_to_come.is_down else "closed"

    @property
    def used_bytes(self) -> int:
        return sum(block.num_bytes for block, _ in self.records.values())

    def resize(self, capacity_bytes: int) -> None:
        del capacity_bytes

    def size_of(self, record_bytes: int) -> int:
        return record_bytes + EXTRA_BYTES

    async def recover(self) -> list[KeptBlock]:
        if self.faults_to_come.is_down:
            raise StoreUnavailableError("it is down")
        kept: dict[BlockHash, KeptBlock] = {}
        left = {block.block_hash: block for block, _ in self.records.values()}
        while found := [b for b in left.values() if b.parent is None or b.parent in kept]:
            for block in found:
                kept[block.block_hash] = left.pop(block.block_hash)
        for block_hash in left:
            del self.records[block_hash]
        return list(kept.values())

    async def count(self, hashes: Sequence[BlockHash]) -> int:
        await self._elapse("count")
        if self.faults_to_come.is_down:
            return 0
        return next((i for i, h in enumerate(hashes) if h not in self.records), len(hashes))

    async def write(self, records: Sequence[OutgoingRecord]) -> list[bool]:
        async with self._turns.of([record.block.block_hash for record in records]):
            await self._elapse("write")
            return [self._write(record) for record in records]

    async def read(
        self,
        hashes: Sequence[BlockHash],
        into: Sequence[memoryview],
        arrived: Arrived | None = None,
    ) -> list[KeptBlock | None]:
        async with self._turns.of(hashes):
            blocks: list[KeptBlock | None] = []
            for block_hash, buffer in zip(hashes, into, strict=True):
                if len(blocks) % READ_AT_ONCE == 0:
                    if self.gate is not None:
                        await self.gate.wait()
                    await self._elapse("read")
                block = self._read(block_hash, buffer)
                blocks.append(block)
                if arrived is not None and block is not None and None not in blocks:
                    arrived([block])
            return blocks

    async def remove(self, hashes: Sequence[BlockHash]) -> None:
        async with self._turns.of(hashes):
            await self._elapse("remove")
            for block_hash in hashes:
                self.records.pop(block_hash, None)

    async def close(self) -> None:
        await self._elapse("close")

    async def _elapse(self, name: str) -> None:
        """Others run meanwhile."""
        self._calls += 1
        for _ in range(self.delays[self._calls % len(self.delays)]):
            await asyncio.sleep(0)
        if self.pause is not None:
            self.pause(name)
        await asyncio.sleep(0)

    def _write(self, record: OutgoingRecord) -> bool:
        self.num_writes += 1
        if self.faults_to_come.is_down:
            self.faults += 1
            return False
        if self.faults_to_come.refuse_writes:
            self.faults_to_come.refuse_writes -= 1
            self.faults += 1
            return False
        self.records[record.block.block_hash] = (record.block, bytes(record.data))
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return True

    def _read(self, block_hash: BlockHash, into: memoryview) -> KeptBlock | None:
        self.num_reads += 1
        if self.faults_to_come.is_down:
            return None
        if self.faults_to_come.fail_reads:
            self.faults_to_come.fail_reads -= 1
            self.faults += 1
            return None
        if block_hash not in self.records:
            return None
        block, data = self.records[block_hash]
        if self.faults_to_come.lose_reads or len(data) != len(into):
            self.faults_to_come.lose_reads = max(0, self.faults_to_come.lose_reads - 1)
            del self.records[block_hash]
            return None
        into[:] = data
        return block

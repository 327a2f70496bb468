"""One suite for every backend: what a tier below memory may rely on, whatever the medium.

A medium is a fixture that opens backends on one and the same content and can damage it. A new
backend adds its fixture's name to MEDIA."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pytest
from redis_server import RedisServer, installed_servers

from prefix_store.backend import Backend, KeptBlock, OutgoingRecord
from prefix_store.base import BlockHash
from prefix_store.disk_backend import DiskBackend
from prefix_store.hashing import as_token_ids, extend_chain, routing_root
from prefix_store.record import RecordShape, seal, write_header
from prefix_store.redis_backend import RedisBackend

MEDIA = ["disk", "disk_direct", *installed_servers()]
CAPACITY_BYTES = 64 * 1024**2
BLOCK_SIZE = 4


class Medium(Protocol):
    """Where a backend keeps its records. Each `start` is like a new process on the same content;
    what was started before it is closed."""

    async def start(self) -> Backend:
        """A backend that has not recovered yet."""

    async def stored(self, block_hash: BlockHash) -> bytes:
        """The bytes that lie there for a block, however the backend wraps its record."""

    async def replace(self, block_hash: BlockHash, raw: bytes) -> None:
        """Put other bytes in their place, behind the backend's back."""


class DiskMedium:
    def __init__(self, path: Path, *, direct: bool = False) -> None:
        self._path, self._blocks, self._direct = path, path / "blocks", direct
        self._running: DiskBackend | None = None

    async def start(self) -> Backend:
        await self.stop()
        self._running = DiskBackend(self._path, CAPACITY_BYTES, direct=self._direct)
        return self._running

    async def stop(self) -> None:
        if self._running is not None:
            await self._running.close()
            self._running = None

    async def stored(self, block_hash: BlockHash) -> bytes:
        return (self._blocks / block_hash.hex()).read_bytes()

    async def replace(self, block_hash: BlockHash, raw: bytes) -> None:
        (self._blocks / block_hash.hex()).write_bytes(raw)


@pytest.fixture
async def disk(tmp_path: Path) -> AsyncIterator[Medium]:
    medium = DiskMedium(tmp_path / "tier")
    yield medium
    await medium.stop()


@pytest.fixture
async def disk_direct(tmp_path: Path) -> AsyncIterator[Medium]:
    medium = DiskMedium(tmp_path / "tier", direct=True)
    yield medium
    await medium.stop()


class RedisMedium:
    def __init__(self, server: RedisServer) -> None:
        self._server = server
        self._running: RedisBackend | None = None

    async def start(self) -> Backend:
        await self.stop()
        # More time than anybody would give it: a busy machine is no fault of the backend.
        self._running = RedisBackend(self._server.url, "store", timeout_s=5)
        return self._running

    async def stop(self) -> None:
        if self._running is not None:
            await self._running.close()
            self._running = None

    async def stored(self, block_hash: BlockHash) -> bytes:
        raw = self._server.call("GET", f"hs1:b:{block_hash.hex()}")
        assert isinstance(raw, bytes)
        return raw

    async def replace(self, block_hash: BlockHash, raw: bytes) -> None:
        self._server.call("SET", f"hs1:b:{block_hash.hex()}", raw)


async def redis_medium(server: RedisServer) -> AsyncIterator[Medium]:
    server.call("FLUSHALL")
    medium = RedisMedium(server)
    yield medium
    await medium.stop()


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    server = RedisServer(installed_servers()["redis"])
    yield server
    server.close()


@pytest.fixture(scope="module")
def valkey_server() -> Iterator[RedisServer]:
    server = RedisServer(installed_servers()["valkey"])
    yield server
    server.close()


@pytest.fixture
async def redis(redis_server: RedisServer) -> AsyncIterator[Medium]:
    async for medium in redis_medium(redis_server):
        yield medium


@pytest.fixture
async def valkey(valkey_server: RedisServer) -> AsyncIterator[Medium]:
    async for medium in redis_medium(valkey_server):
        yield medium


@pytest.fixture(params=MEDIA)
def medium(request: pytest.FixtureRequest) -> Medium:
    found: Medium = request.getfixturevalue(request.param)
    return found


async def ready(medium: Medium) -> Backend:
    backend = await medium.start()
    await backend.recover()
    return backend


@dataclass(frozen=True)
class Written:
    """A record as the tests know it, before the backend tells what it takes there."""

    block_hash: BlockHash
    parent: BlockHash | None
    salt: str
    data: bytes

    def outgoing(self, backend: Backend) -> OutgoingRecord:
        block = KeptBlock(
            self.block_hash, self.parent, BLOCK_SIZE, backend.size_of(len(self.data)), self.salt
        )
        return OutgoingRecord(block, memoryview(self.data))


def prompt_of(
    blocks: Sequence[int], salt: str = "tenant", payload_bytes: int = 5000
) -> list[Written]:
    """The records of a prompt; equal numbers at its start make equal blocks."""
    ids = as_token_ids([number for number in blocks for _ in range(BLOCK_SIZE)])
    root = routing_root("m", salt)
    shape = RecordShape(BLOCK_SIZE, payload_bytes)
    records: list[Written] = []
    parent = root
    for i, block_hash in enumerate(extend_chain(root, ids, BLOCK_SIZE)):
        raw = bytearray(shape.num_bytes)
        view = memoryview(raw)
        tokens = ids[i * BLOCK_SIZE : (i + 1) * BLOCK_SIZE].tobytes()
        write_header(view, block_hash, parent, tokens, shape)
        raw[shape.payload_at :] = random.Random(block_hash).randbytes(payload_bytes)
        seal(view, block_hash, shape)
        records.append(Written(block_hash, parent if i else None, "" if i else salt, bytes(raw)))
        parent = block_hash
    return records


async def write(backend: Backend, records: Sequence[Written]) -> list[bool]:
    return await backend.write([record.outgoing(backend) for record in records])


async def read(backend: Backend, records: Sequence[Written]) -> list[bytes | None]:
    """What comes back; that the block is described as it was written is checked on the way."""
    buffers = [bytearray(len(record.data)) for record in records]
    blocks = await backend.read(
        [record.block_hash for record in records], [memoryview(buffer) for buffer in buffers]
    )
    for record, block in zip(records, blocks, strict=True):
        assert block is None or block == record.outgoing(backend).block
    return [
        bytes(buffer) if block is not None else None
        for buffer, block in zip(buffers, blocks, strict=True)
    ]


async def test_what_is_written_is_read_back(medium: Medium) -> None:
    """Bytes and description of every record are those that were written."""
    backend = await ready(medium)
    records = prompt_of(range(30))
    assert await write(backend, records) == [True] * 30
    assert await read(backend, records) == [record.data for record in records]


async def test_records_of_different_sizes_live_side_by_side(medium: Medium) -> None:
    """Several namespaces share one backend."""
    backend = await ready(medium)
    records = [
        record
        for size in (1, 4096, 100_000, 1_000_001)
        for record in prompt_of([1, 2], salt=str(size), payload_bytes=size)
    ]
    assert all(await write(backend, records))
    assert await read(backend, records) == [record.data for record in records]


async def test_a_record_takes_at_least_its_bytes(medium: Medium) -> None:
    """And larger records never take less."""
    backend = await ready(medium)
    sizes = [backend.size_of(num_bytes) for num_bytes in (1, 100, 4096, 5000, 10**6)]
    assert sizes == sorted(sizes)
    assert sizes[0] >= 1
    assert sizes[-1] >= 10**6


async def test_nothing_is_read_where_nothing_was_written(medium: Medium) -> None:
    """An unknown block is not there; others in the same call are."""
    backend = await ready(medium)
    known, unknown = prompt_of([1]), prompt_of([2])
    await write(backend, known)
    assert await read(backend, unknown + known) == [None, known[0].data]


async def test_nothing_asked_for_nothing_done(medium: Medium) -> None:
    """Empty calls are no error."""
    backend = await ready(medium)
    assert await backend.write([]) == []
    assert await backend.read([], []) == []
    assert await backend.count([]) == 0
    await backend.remove([])


async def test_a_second_write_of_a_block_is_harmless(medium: Medium) -> None:
    """It is there afterwards, as before."""
    backend = await ready(medium)
    records = prompt_of([1, 2])
    assert await write(backend, records) == [True, True]
    assert await write(backend, records) == [True, True]
    assert await read(backend, records) == [record.data for record in records]


async def test_what_is_removed_is_gone(medium: Medium) -> None:
    """Unknown blocks are ignored; what is removed can be written again."""
    backend = await ready(medium)
    records = prompt_of([1, 2, 3])
    await write(backend, records)
    unknown = prompt_of([9])[0].block_hash
    await backend.remove([records[2].block_hash, unknown])
    assert await read(backend, records) == [records[0].data, records[1].data, None]
    assert await write(backend, records[2:]) == [True]
    assert await read(backend, records[2:]) == [records[2].data]


async def test_count_is_that_of_the_leading_run(medium: Medium) -> None:
    """What comes after a gap does not count."""
    backend = await ready(medium)
    records = prompt_of([1, 2, 3, 4])
    await write(backend, [*records[:2], records[3]])
    assert await backend.count([record.block_hash for record in records]) == 2
    assert await backend.count([record.block_hash for record in records[2:]]) == 0


@pytest.mark.parametrize("extra", [-64, 64])
async def test_a_record_of_another_length_is_not_there(medium: Medium, extra: int) -> None:
    """Whoever expects another length does not know this record; it is removed."""
    backend = await ready(medium)
    (record,) = prompt_of([1])
    await write(backend, [record])
    buffer = memoryview(bytearray(len(record.data) + extra))
    assert await backend.read([record.block_hash], [buffer]) == [None]
    assert await read(backend, [record]) == [None]


@pytest.mark.parametrize("place", ["first", "hash", "parent", "tokens", "payload", "end"])
async def test_a_flipped_bit_is_found_at_the_read(medium: Medium, place: str) -> None:
    """Wherever in the record it is: the block is gone, its neighbours are not touched."""
    backend = await ready(medium)
    records = prompt_of([1, 2, 3])
    await write(backend, records)
    raw = bytearray(await medium.stored(records[1].block_hash))
    start = raw.index(records[1].data)
    at = {"first": 0, "hash": 9, "parent": 25, "tokens": 66, "payload": 2000}
    raw[start + at.get(place, len(records[1].data) - 1)] ^= 4
    await medium.replace(records[1].block_hash, bytes(raw))
    expected = [records[0].data, None, records[2].data]
    assert await read(backend, records) == expected
    assert await read(backend, records) == expected
    assert await write(backend, records[1:2]) == [True]
    assert await read(backend, records) == [record.data for record in records]


@pytest.mark.parametrize("keep", [0.0, 0.001, 0.5, 0.999])
async def test_a_torn_record_is_not_there(medium: Medium, keep: float) -> None:
    """Cut off anywhere, also before the header's end; found at the read or at the next start."""
    backend = await ready(medium)
    records = prompt_of([1, 2])
    await write(backend, records)
    for record in records:
        raw = await medium.stored(record.block_hash)
        await medium.replace(record.block_hash, raw[: int(len(raw) * keep)])
    assert await read(backend, records[1:]) == [None]
    restarted = await ready(medium)
    assert await read(restarted, records) == [None, None]


async def test_a_record_in_another_blocks_place_is_not_there(medium: Medium) -> None:
    """The bytes are intact, but not those of the block that was asked for."""
    backend = await ready(medium)
    records = prompt_of([1, 2, 3])
    await write(backend, records)
    other = await medium.stored(records[2].block_hash)
    await medium.replace(records[1].block_hash, other)
    assert await read(backend, records) == [records[0].data, None, records[2].data]


async def test_a_restart_finds_everything(medium: Medium) -> None:
    """Each block as it was described, salts included, parents before their children."""
    backend = await ready(medium)
    records = [
        *prompt_of([1, 2, 3]),
        *prompt_of([1, 2, 4, 5])[2:],
        *prompt_of([1, 2], salt="ünother tenant"),
        *prompt_of([7], salt=""),
    ]
    assert all(await write(backend, records))
    restarted = await medium.start()
    recovered = await restarted.recover()
    for block in recovered:
        record = next(each for each in records if each.block_hash == block.block_hash)
        assert block.record_bytes == len(record.data)
        assert block.token_ids in (b"", record.data[64 : 64 + 4 * BLOCK_SIZE])
    described = {record.block_hash: record.outgoing(restarted).block for record in records}
    assert {block.block_hash: block for block in recovered} == described
    seen: set[BlockHash | None] = {None}
    for block in recovered:
        assert block.parent in seen
        seen.add(block.block_hash)
    assert await read(restarted, records) == [record.data for record in records]


async def test_a_restart_leaves_no_child_without_its_parent(medium: Medium) -> None:
    """Below a block that went, nothing can ever be used: it is removed."""
    backend = await ready(medium)
    records, others = prompt_of([1, 2, 3, 4]), prompt_of([5, 6])
    await write(backend, records + others)
    await backend.remove([records[1].block_hash])
    restarted = await medium.start()
    kept = {block.block_hash for block in await restarted.recover()}
    assert kept == {record.block_hash for record in (records[0], *others)}
    assert await read(restarted, records) == [records[0].data, None, None, None]


async def test_a_read_tells_of_its_blocks_as_they_arrive(medium: Medium) -> None:
    """In order and whole, up to the first that is not there; the answer at the end has them all."""
    backend = await ready(medium)
    records = prompt_of(range(24), payload_bytes=200_000)
    await write(backend, records[:10] + records[11:])
    buffers = [bytearray(len(record.data)) for record in records]
    told: list[KeptBlock] = []

    def arrived(blocks: Sequence[KeptBlock]) -> None:
        told.extend(blocks)
        assert all(buffers[i] == records[i].data for i in range(len(told)))

    hashes = [record.block_hash for record in records]
    blocks = await backend.read(hashes, [memoryview(buffer) for buffer in buffers], arrived)
    assert told == blocks[:10] == [record.outgoing(backend).block for record in records[:10]]
    assert blocks[10] is None
    assert None not in blocks[11:]


async def test_a_cancelled_read_leaves_the_buffers_alone(medium: Medium) -> None:
    """Once the caller knows that its call has ended, it may use the buffers for something else."""
    backend = await ready(medium)
    records = prompt_of(range(24), payload_bytes=200_000)
    await write(backend, records)
    for turns in range(6):
        buffers = [bytearray(len(record.data)) for record in records]
        reading = asyncio.create_task(
            backend.read([record.block_hash for record in records], [*map(memoryview, buffers)])
        )
        for _ in range(turns):
            await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        for buffer in buffers:
            buffer[:] = bytes(len(buffer))
        assert await read(backend, records) == [record.data for record in records]
        assert not any(any(buffer) for buffer in buffers)


async def test_a_cancelled_write_leaves_whole_records_or_none(medium: Medium) -> None:
    """And none of them is read from after the call has ended."""
    backend = await ready(medium)
    for turns in range(6):
        records = prompt_of([turns, *range(12)], payload_bytes=200_000)
        data = [bytearray(record.data) for record in records]
        outgoing = [
            OutgoingRecord(record.outgoing(backend).block, memoryview(raw))
            for record, raw in zip(records, data, strict=True)
        ]
        writing = asyncio.create_task(backend.write(outgoing))
        for _ in range(turns):
            await asyncio.sleep(0)
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
        for raw in data:
            raw[:] = os.urandom(len(raw))
        for record, got in zip(records, await read(backend, records), strict=True):
            assert got in (None, record.data)
        assert await write(backend, records) == [True] * len(records)
        await backend.remove([record.block_hash for record in records])


async def test_calls_at_the_same_time_do_not_harm_each_other(medium: Medium) -> None:
    """Readers, writers and removers of the same blocks: what is read is what was written."""
    backend = await ready(medium)
    records = prompt_of(range(10), payload_bytes=50_000)
    hashes = [record.block_hash for record in records]

    async def write_and_remove() -> None:
        for _ in range(5):
            await write(backend, records)
            await backend.remove(hashes[5:])

    async def read_often() -> None:
        for _ in range(10):
            for record, got in zip(records, await read(backend, records), strict=True):
                assert got in (None, record.data)

    async with asyncio.TaskGroup() as group:
        for work in (write_and_remove, read_often, write_and_remove, read_often):
            group.create_task(work())
    assert await write(backend, records) == [True] * 10
    assert await read(backend, records) == [record.data for record in records]

"""The event subscriber over real sockets, against the store's publisher and a minimal one."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import zmq
import zmq.asyncio
from waiting import until

from engine_adapter.event_subscriber import EventSubscriber, binds
from prefix_store.event_publisher import EventPublisher
from prefix_store.event_source import EventSource
from prefix_store.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlocksLoaded,
    BlockStored,
    EventBatch,
    KVEvent,
    encode,
)
from prefix_store.residency import Residency


class SetSink:
    """The blocks that the publisher has, as far as is known."""

    def __init__(self) -> None:
        self.copies: Counter[int | bytes] = Counter()
        self.orphans = self.overcounts = 0

    @property
    def blocks(self) -> set[int | bytes]:
        return set(+self.copies)

    def apply(self, batch: EventBatch) -> None:
        for event in batch.events:
            if isinstance(event, BlockStored):
                self.copies.update(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                self.copies.subtract(event.block_hashes)
            else:
                self.copies.clear()

    def clear(self) -> None:
        self.copies.clear()


def stored(*blocks: int) -> BlockStored:
    return BlockStored(list(blocks), None, [], 1)


class Store:
    """A publisher that can be killed and started again on the same endpoints."""

    def __init__(self, directory: Path) -> None:
        self.events = f"ipc://{directory}/e.sock"
        self.replay = f"ipc://{directory}/r.sock"
        self.resident: set[int] = set()
        self.publisher: EventPublisher | None = None
        self.task: asyncio.Task[None] | None = None

    def start(self, **options: int) -> None:
        self.resident.clear()
        self.publisher = EventPublisher(self.events, self.replay, snapshot=self.snapshot, **options)
        self.task = asyncio.create_task(self.publisher.run())

    async def snapshot(self) -> list[KVEvent]:
        return [stored(*sorted(self.resident))]

    def store(self, *blocks: int) -> None:
        assert self.publisher is not None
        self.resident.update(blocks)
        self.publisher.publish([stored(*blocks)])

    def remove(self, *blocks: int) -> None:
        assert self.publisher is not None
        self.resident.difference_update(blocks)
        self.publisher.publish([BlockRemoved(list(blocks))])

    async def stop(self) -> None:
        if self.task is not None and self.publisher is not None:
            self.task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self.task
            self.publisher.close()
        self.task = self.publisher = None


@contextlib.asynccontextmanager
async def running(subscriber: EventSubscriber) -> AsyncIterator[EventSubscriber]:
    task = asyncio.create_task(subscriber.run())
    try:
        yield subscriber
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@contextlib.asynccontextmanager
async def store_at(directory: Path) -> AsyncIterator[Store]:
    store = Store(directory)
    try:
        yield store
    finally:
        await store.stop()


@pytest.mark.parametrize(
    ("endpoint", "publisher_binds"),
    [
        ("ipc:///run/x.sock", True),
        ("tcp://*:5557", True),
        ("tcp://[::ffff:127.0.0.1]:5557", True),
        ("tcp://127.0.0.1:5557", False),
        ("tcp://engine:5557", False),
    ],
)
def test_who_binds(endpoint: str, publisher_binds: bool) -> None:
    """vLLM's rule: it binds wildcards and ipc, and connects to everything else."""
    assert binds(endpoint) is publisher_binds


async def test_late_joiner_learns_history_and_follows_live(tmp_path: Path) -> None:
    """Joining late costs nothing: first the replay, then what is published."""
    async with store_at(tmp_path) as store:
        store.start()
        store.store(1, 2, 3)
        store.remove(2)
        sink = SetSink()
        async with running(EventSubscriber("s", store.events, store.replay, sink)) as subscriber:
            await until(lambda: sink.blocks == {1, 3})
            store.store(4)
            await until(lambda: sink.blocks == {1, 3, 4} and not subscriber.state().lacking)
            state = subscriber.state()
            assert state.connected
            assert state.problem is None
            assert (state.last_sequence, state.batches, state.events) == (1, 2, 3)
            assert (state.gaps, state.resyncs, state.incarnation) == (0, 0, 1)
            assert state.lag_s is not None


async def test_late_joiner_gets_a_snapshot_where_the_buffer_is_short(tmp_path: Path) -> None:
    """The store's whole content is known, each block once, whatever its publisher forgot."""
    async with store_at(tmp_path) as store:
        store.start(buffer_batches=2)
        for block in range(20):
            store.store(block)
        store.remove(0)
        sink = SetSink()
        async with running(EventSubscriber("s", store.events, store.replay, sink)) as subscriber:
            await until(lambda: sink.blocks == set(range(1, 20)))
            store.store(99)
            await until(lambda: 99 in sink.blocks and not subscriber.state().lacking)
            assert max(sink.copies.values()) == 1


async def test_restart_of_the_publisher_clears_and_rebuilds(tmp_path: Path) -> None:
    """A new publisher is recognised, also when its sequence has passed the old one's."""
    async with store_at(tmp_path) as store:
        store.start()
        store.store(1, 2)
        sink = SetSink()
        async with running(EventSubscriber("s", store.events, store.replay, sink)) as subscriber:
            await until(lambda: sink.blocks == {1, 2})
            await store.stop()
            await until(lambda: not subscriber.state().connected)
            assert subscriber.state().lacking
            store.start()
            for block in (7, 8, 9):
                store.store(block)
            await until(lambda: sink.blocks == {7, 8, 9})
            assert subscriber.state().incarnation == 2
            await store.stop()
            store.start()
            await until(lambda: subscriber.state().incarnation == 3)
            assert sink.blocks == set()


async def test_publisher_that_comes_late_is_found(tmp_path: Path) -> None:
    """The order in which processes start does not matter."""
    async with store_at(tmp_path) as store:
        sink = SetSink()
        async with running(EventSubscriber("s", store.events, store.replay, sink)) as subscriber:
            await asyncio.sleep(0.05)
            state = subscriber.state()
            assert not state.connected
            assert state.problem == f"nobody publishes on {store.events}"
            store.start()
            store.store(1)
            await until(lambda: sink.blocks == {1} and not subscriber.state().lacking)


async def test_new_incarnation_by_the_health_check_rebuilds(tmp_path: Path) -> None:
    """What is known goes at once; what the publisher still says comes again."""
    async with store_at(tmp_path) as store:
        store.start()
        store.store(1)
        sink = SetSink()
        async with running(EventSubscriber("s", store.events, store.replay, sink)) as subscriber:
            await until(lambda: sink.blocks == {1})
            subscriber.new_incarnation()
            assert sink.blocks == set()
            await until(lambda: sink.blocks == {1})
            assert subscriber.state().incarnation == 2


async def test_burst_is_followed_to_its_end(tmp_path: Path) -> None:
    """More than the queues hold: what was dropped is asked again, nothing is doubled."""
    async with store_at(tmp_path) as store:
        store.start()
        sink = SetSink()
        async with running(EventSubscriber("s", store.events, store.replay, sink)) as subscriber:
            await until(lambda: subscriber.state().connected)
            for block in range(30_000):
                store.store(block)
                if block % 5_000 == 0:
                    await asyncio.sleep(0)
            await until(lambda: not subscriber.state().lacking and sink.blocks == store.resident)
            assert max(sink.copies.values()) == 1


class Turns:
    """Counts what a sink gets between two turns of another task."""

    def __init__(self, sink: EventSource) -> None:
        self._sink = sink
        self._blocks = 0
        self.most = 0
        self.orphans = self.overcounts = 0

    def apply(self, batch: EventBatch) -> None:
        self._sink.apply(batch)
        for event in batch.events:
            self._blocks += len(event.block_hashes) if isinstance(event, BlockStored) else 0
        self.most = max(self.most, self._blocks)

    def clear(self) -> None:
        self._sink.clear()

    async def run(self) -> None:
        while True:
            self._blocks = 0
            await asyncio.sleep(0)


@pytest.mark.parametrize("live", [True, False], ids=["live", "replayed"])
async def test_flood_leaves_others_their_turns(tmp_path: Path, live: bool) -> None:
    """200,000 blocks at once are applied in small portions."""
    async with store_at(tmp_path) as store:
        store.start(buffer_bytes=64 * 1024**2)
        source = EventSource("s", Residency(1024**3), model="m", block_size=16)
        turns = Turns(source)
        subscriber = EventSubscriber("s", store.events, store.replay, turns)
        async with asyncio.TaskGroup() as tasks:
            others = tasks.create_task(turns.run())
            following = tasks.create_task(subscriber.run()) if live else None
            await until(lambda: not live or subscriber.state().replays == 1)
            for chain in range(400):
                flood(store, chain, 500)
            following = following or tasks.create_task(subscriber.run())
            async with asyncio.timeout(60):
                while source.stats().blocks < 200_000:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert 500 <= turns.most <= 1_500
            others.cancel()
            following.cancel()


def flood(store: Store, chain: int, num_blocks: int) -> None:
    assert store.publisher is not None
    first = chain * num_blocks
    tokens = [100_000 + chain] * (16 * num_blocks)
    names: list[int | bytes] = list(range(first, first + num_blocks))
    store.publisher.publish([BlockStored(names, None, tokens, 16)])


async def test_lag_counts_until_a_batch_is_applied(tmp_path: Path) -> None:
    """Also while it waits for the end of a replay, before anything is applied."""
    async with engine() as publisher:
        sink = SetSink()
        silent = f"tcp://127.0.0.1:{free_port()}"
        subscriber = EventSubscriber("e", publisher.endpoint, silent, sink, replay_timeout_s=0.3)
        async with running(subscriber):
            await publisher.connect()
            await until(lambda: subscriber.state().connected)
            await publisher.publish(stored(1))
            await until(lambda: (subscriber.state().lag_s or 0.0) > 0.0)
            assert sink.blocks == set()
            await until(lambda: sink.blocks == {1})


async def test_load_reports_go_elsewhere(tmp_path: Path) -> None:
    """They have their own topic and sequence, and never disturb the blocks'."""
    async with store_at(tmp_path) as store:
        store.start()
        sink = SetSink()
        loads: list[BlocksLoaded] = []
        loaded = BlocksLoaded("x", 32, 32, 100, 0.1)
        subscriber = EventSubscriber(
            "s", store.events, store.replay, sink, loads=loads.append, publisher_binds=True
        )
        async with running(subscriber):
            store.store(1)
            await until(lambda: sink.blocks == {1})
            assert store.publisher is not None
            for _ in range(3):
                store.publisher.publish_loaded(loaded)
            store.store(2)
            await until(lambda: sink.blocks == {1, 2} and len(loads) == 3)
            assert loads == [loaded] * 3
            assert subscriber.state().gaps == 0


class Engine:
    """A publisher as plain as vLLM's that connects; its replay can be silent."""

    def __init__(self) -> None:
        self.context = zmq.asyncio.Context()
        self.pub = self.context.socket(zmq.XPUB)  # a PUB that says who has subscribed
        self.port = free_port()
        self.sequence = 0

    @property
    def endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    async def connect(self) -> None:
        """Until the subscriber will hear what is published: what comes earlier is lost."""
        self.pub.connect(self.endpoint)
        assert (await self.pub.recv())[:1] == b"\x01"

    async def publish(self, *events: BlockStored | BlockRemoved | AllBlocksCleared) -> None:
        payload = encode(EventBatch(float(self.sequence), list(events)))
        await self.send(b"kv-events", self.sequence.to_bytes(8, "big"), payload)
        self.sequence += 1

    async def send(self, *frames: bytes) -> None:
        await self.pub.send_multipart(frames)


def free_port() -> int:
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.asynccontextmanager
async def engine() -> AsyncIterator[Engine]:
    each = Engine()
    try:
        yield each
    finally:
        each.context.destroy(linger=0)


async def test_engine_that_connects_is_followed_without_its_replay() -> None:
    """We bind where vLLM connects. A silent replay endpoint is said, and live events still count;
    a gap then voids what may have been removed meanwhile."""
    async with engine() as publisher:
        sink = SetSink()
        silent = f"tcp://127.0.0.1:{free_port()}"
        subscriber = EventSubscriber(
            "e", publisher.endpoint, silent, sink, replay_timeout_s=0.05, max_retry_s=0.2
        )
        async with running(subscriber):
            await publisher.connect()
            await until(lambda: subscriber.state().connected)
            await until(lambda: subscriber.state().problem is not None)
            assert subscriber.state().problem == f"the replay endpoint {silent} does not answer"
            await publisher.publish(stored(1))
            await until(lambda: sink.blocks == {1})
            publisher.sequence += 5
            await publisher.publish(stored(2))
            await publisher.publish(stored(3))
            await until(lambda: sink.blocks == {2, 3})
            assert subscriber.state().lacking
            await until(lambda: subscriber.state().replays > 2)
            assert sink.blocks == {2, 3}


async def test_malformed_messages_are_counted_and_survived() -> None:
    """Whatever comes in, the next good batch is applied."""
    async with engine() as publisher:
        sink = SetSink()
        silent = f"tcp://127.0.0.1:{free_port()}"
        subscriber = EventSubscriber("e", publisher.endpoint, silent, sink, replay_timeout_s=0.05)
        async with running(subscriber):
            await publisher.connect()
            await until(lambda: subscriber.state().problem is not None)
            await until(lambda: subscriber.state().connected)
            await publisher.send(b"only one frame")
            await publisher.send(b"", b"short", b"")
            await publisher.publish(stored(1))
            await publisher.send(b"", (1).to_bytes(8, "big"), b"\xc1")
            publisher.sequence = 2
            await publisher.publish(stored(2))
            await until(lambda: sink.blocks == {1, 2})
            assert subscriber.state().malformed == 3

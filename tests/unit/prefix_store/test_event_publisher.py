"""The store's event publisher, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from prefix_store.event_publisher import (
    BATCH_WEIGHT,
    EndpointInUseError,
    EventPublisher,
)
from prefix_store.events import (
    END_OF_REPLAY,
    TOPIC_BLOCKS,
    TOPIC_LOADS,
    AllBlocksCleared,
    BlockRemoved,
    BlocksLoaded,
    BlockStored,
    EventBatch,
    KVEvent,
    decode_batch,
    decode_loaded,
)


@dataclass(frozen=True, slots=True)
class Received:
    sequence: int
    batch: EventBatch


def stored(name: str, num_tokens: int = 4) -> BlockStored:
    return BlockStored([name.encode()], None, list(range(num_tokens)), num_tokens, medium="CPU")


async def nothing() -> list[KVEvent]:
    return []


@contextlib.asynccontextmanager
async def publishing(
    directory: Path,
    snapshot: Callable[[], list[KVEvent]] = list,
    **options: int,
) -> AsyncIterator[EventPublisher]:
    async def resident() -> list[KVEvent]:
        await asyncio.sleep(0)  # others may publish while a snapshot is made
        return snapshot()

    publisher = EventPublisher(
        f"ipc://{directory}/e.sock", f"ipc://{directory}/r.sock", snapshot=resident, **options
    )
    task = asyncio.create_task(publisher.run())
    try:
        yield publisher
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        publisher.close()


async def ask(directory: Path, *request: bytes) -> list[Received]:
    """Ask for a replay as vLLM's own clients do."""
    context = zmq.asyncio.Context()
    dealer = context.socket(zmq.DEALER)
    try:
        dealer.connect(f"ipc://{directory}/r.sock")
        await dealer.send_multipart(request)
        answer = []
        while True:
            frames = await asyncio.wait_for(dealer.recv_multipart(), 10)
            empty, topic, sequence, payload = frames
            assert empty == b""
            if sequence == END_OF_REPLAY:
                return answer
            assert topic == TOPIC_BLOCKS
            answer.append(Received(int.from_bytes(sequence, "big"), decode_batch(payload)))
    finally:
        dealer.close(linger=0)
        context.destroy(linger=0)


async def replay(directory: Path, sequence: int) -> list[Received]:
    return await ask(directory, b"", sequence.to_bytes(8, "big"))


def names_of(received: list[Received]) -> list[bytes | int | None]:
    return [
        event.block_hashes[0] if isinstance(event, BlockStored | BlockRemoved) else None
        for each in received
        for event in each.batch.events
    ]


async def say(publisher: EventPublisher, events: list[KVEvent]) -> None:
    """In a batch of its own."""
    publisher.publish(events)
    await asyncio.sleep(0)


async def test_events_arrive_in_order_on_two_topics(tmp_path: Path) -> None:
    """Each topic has its own sequence, and the payload decodes to what was published."""
    loaded = BlocksLoaded("chatcmpl-x", 64, 64, 1000, 0.5)
    async with publishing(tmp_path) as publisher:
        context = zmq.asyncio.Context()
        sub = context.socket(zmq.SUB)
        try:
            sub.subscribe(b"")
            sub.connect(f"ipc://{tmp_path}/e.sock")
            frames = None
            while frames is None:
                publisher.publish_loaded(loaded)
                with contextlib.suppress(TimeoutError):
                    frames = await asyncio.wait_for(sub.recv_multipart(), 0.05)
            await say(publisher, [stored("a"), AllBlocksCleared()])
            await say(publisher, [BlockRemoved([b"a"], "CPU")])
            blocks = []
            while len(blocks) < 2:
                assert frames[0] in {TOPIC_LOADS, TOPIC_BLOCKS}
                if frames[0] == TOPIC_LOADS:
                    assert decode_loaded(frames[2]) == loaded
                else:
                    blocks.append((int.from_bytes(frames[1], "big"), decode_batch(frames[2])))
                if len(blocks) < 2:
                    frames = await asyncio.wait_for(sub.recv_multipart(), 10)
            assert [sequence for sequence, _ in blocks] == [0, 1]
            assert blocks[0][1].events == [stored("a"), AllBlocksCleared()]
            assert blocks[1][1].events == [BlockRemoved([b"a"], "CPU")]
        finally:
            sub.close(linger=0)
            context.destroy(linger=0)


async def test_what_is_published_in_one_turn_is_one_batch(tmp_path: Path) -> None:
    """In order, unless it is too much; and whoever asks just then gets it."""
    async with publishing(tmp_path) as publisher:
        publisher.publish([stored("a"), stored("b")])
        publisher.publish([BlockRemoved([b"a"], "CPU")])
        publisher.publish([])
        assert publisher.stats().batches == 1
        publisher.publish([stored("c")])
        received = await replay(tmp_path, 0)
        assert [len(each.batch.events) for each in received] == [3, 1]
        assert names_of(received) == [b"a", b"b", b"a", b"c"]


async def test_replay_starts_at_the_sequence_asked(tmp_path: Path) -> None:
    """A subscriber with a gap gets what it missed, and no more."""
    async with publishing(tmp_path) as publisher:
        for name in "abcd":
            await say(publisher, [stored(name)])
        assert names_of(await replay(tmp_path, 2)) == [b"c", b"d"]
        assert [r.sequence for r in await replay(tmp_path, 0)] == [0, 1, 2, 3]
        assert await replay(tmp_path, 4) == []


async def test_late_joiner_gets_a_snapshot(tmp_path: Path) -> None:
    """When the buffer has forgotten what is asked, the answer is everything resident, with the
    sequence and time of the last batch, so that live events follow without a gap."""
    resident = [stored("b"), stored("c")]
    async with publishing(tmp_path, lambda: list(resident), buffer_batches=2) as publisher:
        for name in "abcd":
            await say(publisher, [stored(name)])
        answer = await replay(tmp_path, 0)
        last = (await replay(tmp_path, 3))[0]
        assert answer[0].batch.events == [AllBlocksCleared(), *resident]
        assert answer[-1].sequence == 3
        assert answer[-1].batch.ts == last.batch.ts
        assert publisher.stats().snapshots == 1


async def test_without_a_snapshot_a_late_joiner_gets_what_is_left(tmp_path: Path) -> None:
    """As from vLLM: the oldest batches are lost to it."""
    endpoints = (f"ipc://{tmp_path}/e.sock", f"ipc://{tmp_path}/r.sock")
    publisher = EventPublisher(*endpoints, snapshot=None, buffer_batches=2)
    task = asyncio.create_task(publisher.run())
    try:
        for name in ("a", "b", "c"):
            await say(publisher, [stored(name)])
        received = await replay(tmp_path, 0)
        assert [each.sequence for each in received] == [1, 2]
        assert publisher.stats().snapshots == 0
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        publisher.close()


async def test_large_snapshot_comes_in_parts_that_look_like_history(tmp_path: Path) -> None:
    """No message is larger than it must be; the sequences ascend to the last one published."""
    resident: list[KVEvent] = [stored(str(i), BATCH_WEIGHT // 2) for i in range(9)]
    async with publishing(tmp_path, lambda: list(resident), buffer_batches=1) as publisher:
        for _ in range(3):
            await say(publisher, [stored("x")])
        answer = await replay(tmp_path, 0)
        assert [r.sequence for r in answer] == [0, 1, 2]
        assert [e for r in answer for e in r.batch.events] == [AllBlocksCleared(), *resident]
        for _ in range(20):
            await say(publisher, [stored("x")])
        answer = await replay(tmp_path, 0)
        assert [r.sequence for r in answer] == [18, 19, 20, 21, 22]


async def test_buffer_is_bounded_by_bytes_and_batches(tmp_path: Path) -> None:
    """Uptime does not grow the buffer, and a burst is cut into messages of bounded size."""
    async with publishing(tmp_path, buffer_bytes=100_000, buffer_batches=50) as publisher:
        for _ in range(500):
            await say(publisher, [stored("a")])
        assert publisher.stats().buffered_batches == 50
        await say(publisher, [stored(str(i), 1024) for i in range(1000)])
        stats = publisher.stats()
        assert stats.buffered_bytes <= 100_000
        assert stats.batches == 500 + -(-1000 * 1024 // BATCH_WEIGHT)


async def test_malformed_requests_are_counted_and_ignored(tmp_path: Path) -> None:
    """A peer that speaks nonsense gets no answer and harms nobody."""
    async with publishing(tmp_path) as publisher:
        await say(publisher, [stored("a")])
        for request in [(b"",), (b"", b"123"), (b"", b"12345678", b"x")]:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(ask(tmp_path, *request), 0.2)
        assert names_of(await replay(tmp_path, 0)) == [b"a"]
        assert publisher.stats().bad_requests == 3


async def test_nothing_is_published_after_close_and_no_file_is_left(tmp_path: Path) -> None:
    """Closing removes the socket files and may be done twice."""
    async with publishing(tmp_path) as publisher:
        await say(publisher, [stored("a")])
        publisher.close()
        await say(publisher, [stored("b")])
        publisher.publish_loaded(BlocksLoaded("x", 1, 1, 1, 1.0))
        assert publisher.stats().batches == 1
        assert os.listdir(tmp_path) == []


async def test_stale_socket_files_are_replaced(tmp_path: Path) -> None:
    """A store that was killed leaves its files; the next one starts all the same."""
    for name in ("e.sock", "r.sock"):
        with contextlib.closing(socket.socket(socket.AF_UNIX)) as old:
            old.bind(str(tmp_path / name))
    async with publishing(tmp_path) as publisher:
        await say(publisher, [stored("a")])
        assert names_of(await replay(tmp_path, 0)) == [b"a"]


async def test_endpoint_of_a_live_publisher_is_refused(tmp_path: Path) -> None:
    """A second store says so instead of taking the sockets over."""
    async with publishing(tmp_path) as publisher:
        with pytest.raises(EndpointInUseError, match=r"e\.sock: another process does"):
            EventPublisher(f"ipc://{tmp_path}/e.sock", f"ipc://{tmp_path}/x", snapshot=nothing)
        await say(publisher, [stored("a")])
        assert names_of(await replay(tmp_path, 0)) == [b"a"]


async def test_unbindable_endpoint_is_a_clear_error(tmp_path: Path) -> None:
    """The message names the endpoint; the first socket is given back."""
    with pytest.raises(EndpointInUseError, match="no/such/dir"):
        EventPublisher(f"ipc://{tmp_path}/e", f"ipc://{tmp_path}/no/such/dir/r", snapshot=nothing)
    assert os.listdir(tmp_path) == []

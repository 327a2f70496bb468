"""Publishes the store's events in vLLM's wire format (ZmqEventPublisher of vLLM 0.32).

PUB sends frames (topic, 8-byte big-endian sequence, msgpack batch). ROUTER answers a DEALER that
asks [b"", 8-byte sequence] with every batch from that sequence on, as [b"", topic, sequence,
batch], and ends with sequence -1. One thing is better than there: who asks for more than the
buffer still holds gets a snapshot first, so a late joiner misses nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import zmq
import zmq.asyncio

from prefix_store.base import StoreError
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
    encode,
)

logger = logging.getLogger(__name__)

BATCH_WEIGHT = 16_384
"""Tokens and hashes in one batch; more are split, so that no message gets large."""

SEND_QUEUE = 1_000
"""Messages kept for a slow subscriber. It loses what goes beyond, sees the gap and asks again."""

REPLAY_BURST = 64
"""Messages of one answer between two looks at the event loop."""


class EndpointInUseError(StoreError):
    """Another process publishes on this endpoint."""


@dataclass(frozen=True, slots=True)
class _Published:
    sequence: int
    ts: float
    payload: bytes


@dataclass(frozen=True, slots=True)
class PublisherStats:
    """Counts since the start, and the buffer now."""

    batches: int
    loads: int
    replays: int
    snapshots: int
    bad_requests: int
    buffered_batches: int
    buffered_bytes: int


class EventPublisher:
    """Owns both sockets. `publish` never blocks; `run` answers replays until it is cancelled. All
    that is published in one turn of the event loop goes in one batch."""

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str,
        *,
        snapshot: Callable[[], Awaitable[list[KVEvent]]] | None,
        buffer_batches: int = 10_000,
        buffer_bytes: int = 16 * 1024**2,
    ) -> None:
        """Bind both endpoints (ipc:// or tcp://). `snapshot` returns a BlockStored for everything
        that was resident when it was called, parents first; it may take its time and leave out
        what went meanwhile. None: who asks for more than the buffer holds gets what it holds, as
        from vLLM. Raises EndpointInUseError."""
        self._endpoints = (endpoint, replay_endpoint)
        self._snapshot = snapshot
        self._buffer: deque[_Published] = deque()
        self._buffer_batches = buffer_batches
        self._buffer_bytes = buffer_bytes
        self._buffered_bytes = 0
        self._pending: list[KVEvent] = []
        self._next = 0
        self._next_load = 0
        self._last_ts = 0.0
        self._replays = 0
        self._snapshots = 0
        self._bad_requests = 0
        self._closed = False
        for each in self._endpoints:
            _remove_stale(each)
        self._context = zmq.asyncio.Context()
        self._pub = zmq.Socket(self._context, zmq.PUB)
        self._pub.sndhwm = SEND_QUEUE
        self._router = self._context.socket(zmq.ROUTER)
        self._router.sndhwm = buffer_batches + SEND_QUEUE
        self._bound: list[str] = []
        try:
            self._bind(self._pub, endpoint)
            self._bind(self._router, replay_endpoint)
        except BaseException:
            self.close()
            raise

    def publish(self, events: Sequence[KVEvent]) -> None:
        """Send what changed, in order; from within an event loop. Does nothing for no events, or
        after `close`."""
        if events and not self._closed:
            if not self._pending:
                asyncio.get_running_loop().call_soon(self._flush)
            self._pending += events

    def _flush(self) -> None:
        pending, self._pending = self._pending, []
        for part in _split(pending):
            if self._closed:
                return
            sequence, ts = self._next, time.time()
            payload = _encode(ts, part)
            self._next += 1
            self._last_ts = ts
            self._remember(_Published(sequence, ts, payload))
            self._pub.send_multipart(_frames(TOPIC_BLOCKS, sequence, payload), zmq.NOBLOCK)

    def publish_loaded(self, loaded: BlocksLoaded) -> None:
        """Send a load report, on its own topic with its own sequence; never replayed."""
        if self._closed:
            return
        self._flush()
        sequence = self._next_load
        self._next_load += 1
        self._pub.send_multipart(_frames(TOPIC_LOADS, sequence, encode(loaded)), zmq.NOBLOCK)

    async def run(self) -> None:
        """Answer replays until cancelled."""
        while True:
            request = await self._router.recv_multipart()
            if len(request) != 3 or len(request[2]) != 8:
                self._bad_requests += 1
                continue
            client, _, wanted = request
            await self._replay(client, int.from_bytes(wanted, "big"))

    def close(self) -> None:
        """Close the sockets and remove their files. What was not sent yet is dropped."""
        if self._closed:
            return
        self._closed = True
        self._pub.close(linger=0)
        self._router.close(linger=0)
        self._context.destroy(linger=0)
        for endpoint in self._bound:
            path = _ipc_path(endpoint)
            if path is not None:
                path.unlink(missing_ok=True)

    def stats(self) -> PublisherStats:
        self._flush()
        return PublisherStats(
            batches=self._next,
            loads=self._next_load,
            replays=self._replays,
            snapshots=self._snapshots,
            bad_requests=self._bad_requests,
            buffered_batches=len(self._buffer),
            buffered_bytes=self._buffered_bytes,
        )

    def _bind(self, sock: zmq.Socket[Any] | zmq.asyncio.Socket, endpoint: str) -> None:
        if "[" in endpoint:
            sock.ipv6 = True
        try:
            sock.bind(endpoint)
        except zmq.ZMQError as error:
            raise EndpointInUseError(f"cannot publish on {endpoint}: {error}") from error
        self._bound.append(endpoint)

    def _remember(self, published: _Published) -> None:
        self._buffer.append(published)
        self._buffered_bytes += len(published.payload)
        while len(self._buffer) > self._buffer_batches or self._buffered_bytes > self._buffer_bytes:
            self._buffered_bytes -= len(self._buffer.popleft().payload)

    async def _replay(self, client: bytes, wanted: int) -> None:
        """What the answer covers is fixed when it is asked for: what is published while it is put
        together and sent reaches the asker live, with the sequences that follow."""
        self._replays += 1
        self._flush()  # a snapshot has it already
        first = self._buffer[0].sequence if self._buffer else self._next
        if wanted < first and self._snapshot is not None:
            self._snapshots += 1
            answer = await self._snapshot_batches(self._snapshot)
        else:
            answer = [each for each in self._buffer if each.sequence >= wanted]
        for number, each in enumerate(answer, start=1):
            frames = _frames(TOPIC_BLOCKS, each.sequence, each.payload)
            await self._router.send_multipart((client, b"", *frames))
            if number % REPLAY_BURST == 0:
                await asyncio.sleep(0)
        await self._router.send_multipart((client, b"", b"", END_OF_REPLAY, b""))

    async def _snapshot_batches(
        self, snapshot: Callable[[], Awaitable[list[KVEvent]]]
    ) -> list[_Published]:
        """Everything resident, as batches that end with the sequence last published now and carry
        its time. So they look like the history that is gone: a subscriber goes on with the next
        live batch, and whoever compares sequence and time finds them equal to what was published.
        """
        room, ts = self._next, self._last_ts
        parts = list(_split([AllBlocksCleared(), *await snapshot()]))
        if len(parts) > room:
            rest = [event for part in parts[room - 1 :] for event in part]
            parts[room - 1 :] = [rest]
        batches = []
        for sequence, part in enumerate(parts, start=room - len(parts)):
            batches.append(_Published(sequence, ts, _encode(ts, part)))
            await asyncio.sleep(0)
        return batches


def _frames(topic: bytes, sequence: int, payload: bytes) -> tuple[bytes, bytes, bytes]:
    return topic, sequence.to_bytes(8, "big"), payload


def _encode(ts: float, events: Sequence[KVEvent]) -> bytes:
    typed = cast("list[BlockStored | BlockRemoved | AllBlocksCleared]", list(events))
    return encode(EventBatch(ts, typed))


def _split(events: Sequence[KVEvent]) -> Iterator[list[KVEvent]]:
    """Runs of events of about BATCH_WEIGHT; one event is never cut."""
    part: list[KVEvent] = []
    weight = 0
    for event in events:
        part.append(event)
        if isinstance(event, BlockStored):
            weight += len(event.token_ids)
        elif isinstance(event, BlockRemoved):
            weight += len(event.block_hashes)
        if weight >= BATCH_WEIGHT:
            yield part
            part, weight = [], 0
    if part:
        yield part


def _ipc_path(endpoint: str) -> Path | None:
    scheme, _, path = endpoint.partition("://")
    return Path(path) if scheme == "ipc" and not path.startswith("@") else None


def _remove_stale(endpoint: str) -> None:
    """Remove the socket file that a killed process left; ZMQ itself would take over a live one."""
    path = _ipc_path(endpoint)
    if path is None or not path.exists():
        return
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            logger.info("removing the stale socket %s", path)
            path.unlink(missing_ok=True)
            return
    raise EndpointInUseError(f"cannot publish on {endpoint}: another process does")

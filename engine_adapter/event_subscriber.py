"""Follows the KV events of one engine or store: live batches over SUB, replays over DEALER.

Wire format and replay are those of vLLM's ZmqEventPublisher (vllm/distributed/kv_events.py, 0.32).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from engine_adapter.event_inbox import EventInbox, Message
from engine_adapter.event_state import EventState
from engine_adapter.event_stream import Answer, EventSink, EventStream, Need
from prefix_store.events import TOPIC_LOADS, BlocksLoaded, decode_loaded

QUEUE_MESSAGES = 20_000
"""Messages that ZMQ keeps for us; a whole replay of vLLM's (10,000) fits."""
BURST = 32
"""Messages between two looks at the event loop,"""
BURST_BYTES = 32 * 1024
"""or so many bytes: a few hundred blocks, which take a millisecond."""
FIRST_RETRY_S = 0.05
FIRST_CHECK_S = 1.0


class EventSockets:
    """What the streams of a process share: ZMQ's threads, of which each set has its own memory."""

    def __init__(self) -> None:
        self._context: zmq.asyncio.Context | None = None

    @property
    def context(self) -> zmq.asyncio.Context:
        """Made when it is first needed."""
        if self._context is None:
            self._context = zmq.asyncio.Context()
        return self._context

    def close(self) -> None:
        """When the last stream has ended."""
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None


class EventSubscriber:
    """One stream. `run` is a task of its owner; everything happens on its event loop."""

    def __init__(
        self,
        source: str,
        endpoint: str,
        replay_endpoint: str,
        sink: EventSink,
        *,
        loads: Callable[[BlocksLoaded], None] | None = None,
        publisher_binds: bool | None = None,
        sockets: EventSockets | None = None,
        replay_timeout_s: float = 3.0,
        max_retry_s: float = 30.0,
        max_check_s: float = 30.0,
    ) -> None:
        """`loads` gets the load reports of a store. `publisher_binds`: None follows vLLM's rule; a
        store always binds. `sockets`: unset, it has its own. `max_check_s`: longest time between
        two looks at whether the end of a burst was missed."""
        self._source = source
        self._endpoint = endpoint
        self._replay_endpoint = replay_endpoint
        self._sink = sink
        self._loads = loads
        self._sockets = sockets
        self._connects = binds(endpoint) if publisher_binds is None else publisher_binds
        self._replay_timeout_s = replay_timeout_s
        self._max_retry_s = max_retry_s
        self._max_check_s = max_check_s
        self._stream = EventStream(sink)
        self._inbox = EventInbox()
        self._wake = asyncio.Event()
        self._peers = 0
        self._is_paused = True
        """The publisher may be another one: live batches wait until a replay has told."""
        self._epoch = 0
        self._due = float("inf")
        """When to ask for what the stream needs; never before there was a connection."""
        self._retry_s = 0.0
        self._check_s = FIRST_CHECK_S
        self._is_silent = False

    async def run(self) -> None:
        """Follow the publisher until cancelled, through its restarts and absences."""
        if self._sockets is not None:
            await self._run(self._sockets.context)
            return
        own = EventSockets()
        try:
            await self._run(own.context)
        finally:
            own.close()

    async def _run(self, context: zmq.asyncio.Context) -> None:
        sub = context.socket(zmq.SUB)
        sub.rcvhwm = QUEUE_MESSAGES
        sub.subscribe(b"")
        monitor = sub.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        try:
            _attach(sub, self._endpoint, connect=self._connects)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._watch(monitor))
                tasks.create_task(self._receive(sub))
                tasks.create_task(self._follow(context))
        finally:
            self._peers = 0
            sub.disable_monitor()
            monitor.close(linger=0)
            sub.close(linger=0)

    def new_incarnation(self) -> None:
        """The publisher has restarted (the health check saw it): nothing that it had counts."""
        self._start_over(self._stream.new_incarnation)

    def forget(self) -> None:
        """Nothing that it told counts any more. All is asked again as soon as it can be."""
        self._start_over(self._stream.forget)

    @property
    def is_connected(self) -> bool:
        return self._peers > 0

    @property
    def is_current(self) -> bool:
        """Connected, and nothing that was published is known to be missing."""
        return not self._stream.is_behind and self._problem() is None

    def state(self) -> EventState:
        """A snapshot for stats and doctor."""
        stream, counters = self._stream, self._stream.counters
        return EventState(
            source=self._source,
            connected=self.is_connected,
            lacking=not self.is_current,
            problem=self._problem(),
            incarnation=stream.incarnation,
            last_sequence=stream.last_sequence,
            lag_s=self._lag_s(),
            batches=counters.batches,
            events=counters.events,
            num_bytes=counters.num_bytes,
            gaps=counters.gaps,
            replays=counters.replays,
            resyncs=counters.resyncs,
            orphans=self._sink.orphans,
            malformed=counters.malformed,
        )

    def _start_over(self, forget: Callable[[], None]) -> None:
        self._epoch += 1
        self._retry_s = 0.0
        self._inbox.clear()
        forget()
        self._ask_now()

    def _lag_s(self) -> float | None:
        """Of the newest batch; more while others wait for longer than that took."""
        lag_s, waited_s = self._stream.lag_s, self._inbox.waited_s(time.time())
        return max(lag_s or 0.0, waited_s) if waited_s else lag_s

    def _problem(self) -> str | None:
        if not self._peers:
            return f"nobody publishes on {self._endpoint}"
        if self._is_silent:
            return f"the replay endpoint {self._replay_endpoint} does not answer"
        if self._stream.is_incomplete:
            return "the publisher no longer knows how some of its blocks began"
        return None

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        while True:
            event = (await recv_monitor_message(monitor))["event"]
            if event == zmq.EVENT_DISCONNECTED:
                self._peers = max(0, self._peers - 1)
                self._is_paused = True
                continue
            self._peers += 1
            self._retry_s = 0.0  # however long it was away: now it is there
            self._stream.connected()
            self._ask_now()

    async def _receive(self, sub: zmq.asyncio.Socket) -> None:
        """Drain first, think later."""
        while True:
            for _ in range(BURST):
                self._sort(await sub.recv_multipart())
            await asyncio.sleep(0)

    def _sort(self, frames: list[bytes]) -> None:
        counters = self._stream.counters
        counters.num_bytes += sum(len(frame) for frame in frames)
        if len(frames) != 3 or len(frames[1]) != 8:
            counters.malformed += 1
            return
        topic, sequence, payload = frames
        if topic == TOPIC_LOADS:
            self._report_load(payload)
            return
        message = Message(int.from_bytes(sequence, "big"), payload, time.time())
        if not self._inbox.add(message):
            self._stream.lose()
            if not self._is_paused:
                self._ask_now()
        self._wake.set()

    def _report_load(self, payload: bytes) -> None:
        if self._loads is None:
            return
        try:
            loaded = decode_loaded(payload)
        except msgspec.DecodeError:
            self._stream.counters.malformed += 1
            return
        self._loads(loaded)

    async def _follow(self, context: zmq.asyncio.Context) -> None:
        """The only one who applies: live batches wait in the inbox while a replay runs."""
        while True:
            if self._stream.need and self._due <= time.monotonic():
                await self._resynchronise(context)
            elif self._inbox and not self._is_paused:
                self._apply_live()
                await asyncio.sleep(0)
            else:
                await self._rest()

    async def _rest(self) -> None:
        """Until something arrives or is due. Silence is checked: the end of a burst may be lost."""
        self._wake.clear()
        needs = self._stream.need
        delay = min(self._due - time.monotonic(), 60.0) if needs else self._check_s
        try:
            async with asyncio.timeout(max(0.0, delay)):
                await self._wake.wait()
        except TimeoutError:
            if not needs and self._peers:
                self._check_s = min(2 * self._check_s, self._max_check_s)
                self._stream.ask(Need.CHECK)
                self._ask_now()

    def _apply_live(self) -> None:
        num_bytes = 0
        for _ in range(min(BURST, len(self._inbox))):
            message = self._inbox.pop()
            num_bytes += len(message.payload)
            needed = self._stream.need
            self._stream.live(message.sequence, message.payload, time.time())
            if self._stream.need > needed:
                self._ask_now()
                return
            if num_bytes >= BURST_BYTES:
                return

    def _ask_now(self) -> None:
        self._due = time.monotonic()
        self._wake.set()

    async def _resynchronise(self, context: zmq.asyncio.Context) -> None:
        if self._stream.need is not Need.CHECK:
            self._check_s = FIRST_CHECK_S
        if self._stream.need is Need.CATCH_UP:
            self._inbox.clear()  # the answer brings it again, or an earlier publisher sent it
        epoch = self._epoch
        answer = await self._replay(context, epoch)
        if epoch != self._epoch:
            return
        self._stream.end_replay(answer)
        self._is_paused = False
        self._is_silent = answer is Answer.NONE
        if answer is Answer.COMPLETE:
            self._retry_s = 0.0
            return
        self._retry_s = min(max(FIRST_RETRY_S, 2 * self._retry_s), self._max_retry_s)
        self._due = time.monotonic() + self._retry_s

    async def _replay(self, context: zmq.asyncio.Context, epoch: int) -> Answer:
        dealer = context.socket(zmq.DEALER)
        dealer.rcvhwm = QUEUE_MESSAGES
        try:
            _attach(dealer, self._replay_endpoint, connect=True)
            start = self._stream.begin_replay()
            await dealer.send_multipart((b"", start.to_bytes(8, "big")))
            return await self._take_answer(dealer, epoch)
        finally:
            dealer.close(linger=0)

    async def _take_answer(self, dealer: zmq.asyncio.Socket, epoch: int) -> Answer:
        count = num_bytes = 0
        while True:
            try:
                async with asyncio.timeout(self._replay_timeout_s):
                    frames = await dealer.recv_multipart()
            except TimeoutError:
                return Answer.NONE
            if epoch != self._epoch:
                return Answer.NONE
            if len(frames) != 4 or len(frames[2]) != 8:
                self._stream.counters.malformed += 1
                continue
            answer = self._stream.replayed(frames[2], frames[3])
            if answer is not None:
                return answer
            count += 1
            num_bytes += len(frames[3])
            if count >= BURST or num_bytes >= BURST_BYTES:
                count = num_bytes = 0
                await asyncio.sleep(0)


def binds(endpoint: str) -> bool:
    """vLLM's rule: its event socket binds these endpoints and connects to all others."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


def _attach(sock: zmq.asyncio.Socket, endpoint: str, *, connect: bool) -> None:
    if "[" in endpoint:
        sock.ipv6 = True
    if connect:
        sock.connect(endpoint.replace("*", "127.0.0.1"))
    else:
        sock.bind(endpoint)

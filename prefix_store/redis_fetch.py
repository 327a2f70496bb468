"""Values of Redis straight into their buffers.

redis-py copies a value four times and hands it out as a new bytes object; here its leading bytes
are received where they shall lie. Only for replies to GET, on a connection that redis-py has opened
(with TLS, user and database as its URL says) and that gets its protocol back afterwards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

WINDOW_BYTES = 4 * 1024**2
"""Asked for and not there yet: enough for a fast network, little for the server to hold ready."""

MAX_TAIL_BYTES = 64 * 1024
_SCRATCH_BYTES = 4096
_CRLF = b"\r\n"
_CLOSED = "the server closed the connection"


@dataclass(frozen=True, slots=True)
class Landed:
    """A value of which the buffer is full."""

    tail: bytes
    """What came behind."""


@dataclass(frozen=True, slots=True)
class Misfit:
    """A value that is shorter than its buffer, or much longer; the buffer was not used."""


Reply = Landed | Misfit | ResponseError | None
"""None: there is no such key."""


async def fetch(
    connection: Any,
    keys: Sequence[bytes],
    into: Sequence[memoryview],
    landed: Callable[[Reply], None],
) -> None:
    """GET each key; `landed` hears of each reply, in order, as soon as it is complete.
    `connection`: of redis-py, connected. One on which this ended early is closed, and nothing is
    written into the buffers any more. Raises RedisConnectionError."""
    transport = connection._writer.transport
    if transport.is_closing():
        raise RedisConnectionError(_CLOSED)
    former = transport.get_protocol()
    replies = _Replies(transport, keys, into, landed, former)
    _switch(transport, replies)
    try:
        replies.ask()
        await replies.all_there
    except BaseException:
        replies.let_go()
        transport.abort()
        await connection.disconnect(nowait=True)
        raise
    if transport.is_closing():  # right after its last answer
        await connection.disconnect(nowait=True)
    else:
        _switch(transport, former)


def _switch(transport: Any, protocol: asyncio.BaseProtocol) -> None:
    """uvloop looks at what a protocol can do only when it begins to read."""
    transport.pause_reading()
    transport.set_protocol(protocol)
    transport.resume_reading()


class _Replies(asyncio.BufferedProtocol):
    """Takes the stream apart: a line, then, of a value, the place in its buffer and the tail."""

    def __init__(
        self,
        transport: asyncio.WriteTransport,
        keys: Sequence[bytes],
        into: Sequence[memoryview],
        landed: Callable[[Reply], None],
        former: asyncio.BaseProtocol,
    ) -> None:
        self.all_there: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transport = transport
        self._keys = keys
        self._into = into
        self._landed = landed
        self._former = former
        self._num_asked = 0
        self._num_landed = 0
        self._bytes_under_way = 0
        self._place = memoryview(b"")
        """What is still to be filled of the present buffer."""
        self._tail_bytes: int | None = None
        """That follow it; None between two replies."""
        self._unwanted_bytes = 0
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._rest = b""
        """Received in the scratch buffer and not looked at yet."""

    def ask(self) -> None:
        """For the next values, as many as may be under way."""
        commands: list[bytes] = []
        while self._num_asked < len(self._keys):
            key, num_bytes = self._keys[self._num_asked], len(self._into[self._num_asked])
            if self._bytes_under_way and self._bytes_under_way + num_bytes > WINDOW_BYTES:
                break
            commands.append(b"*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n" % (len(key), key))
            self._bytes_under_way += num_bytes
            self._num_asked += 1
        if commands:
            self._transport.write(b"".join(commands))

    def get_buffer(self, sizehint: int) -> memoryview:
        del sizehint
        return self._place or self._scratch

    def buffer_updated(self, nbytes: int) -> None:
        if self._place:
            self._place = self._place[nbytes:]
        else:
            self._rest += self._scratch[:nbytes]
        try:
            while not self._place and self._step():
                pass
        except RedisConnectionError as error:
            self._fail(error)

    def eof_received(self) -> None:
        self._fail(RedisConnectionError(_CLOSED))

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(RedisConnectionError(str(exc or _CLOSED)))
        self._former.connection_lost(exc)

    def let_go(self) -> None:
        """Touch no buffer any more."""
        self._place = memoryview(b"")
        self.all_there.cancel()

    def _step(self) -> bool:
        """Whether there may be more to do with what has come."""
        if self.all_there.done():
            self._rest = b""
            return False
        if self._unwanted_bytes:
            dropped = min(self._unwanted_bytes, len(self._rest))
            self._rest = self._rest[dropped:]
            self._unwanted_bytes -= dropped
            if not self._unwanted_bytes:
                self._land(Misfit())
        elif self._tail_bytes is None:
            line, end, rest = self._rest.partition(_CRLF)
            if not end:
                return False
            self._rest = rest
            self._begin(line)
        else:
            if len(self._rest) < self._tail_bytes + len(_CRLF):
                return False
            tail = self._rest[: self._tail_bytes]
            self._rest = self._rest[self._tail_bytes + len(_CRLF) :]
            self._tail_bytes = None
            self._land(Landed(tail))
        return bool(self._rest)

    def _begin(self, line: bytes) -> None:
        """The first line of a reply."""
        kind, text = line[:1], line[1:].decode(errors="replace")
        if kind == b"-":
            return self._land(ResponseError(text))
        if kind != b"$" or not text.removeprefix("-").isdecimal():
            raise RedisConnectionError(f"an unexpected answer: {line[:40]!r}")
        num_bytes, buffer = int(text), self._into[self._num_landed]
        if num_bytes < 0:
            return self._land(None)
        if not 0 <= num_bytes - len(buffer) <= MAX_TAIL_BYTES:
            self._unwanted_bytes = num_bytes + len(_CRLF)
            return None
        head = self._rest[: len(buffer)]
        buffer[: len(head)] = head
        self._rest = self._rest[len(head) :]
        self._place = buffer[len(head) :]
        self._tail_bytes = num_bytes - len(buffer)
        return None

    def _land(self, reply: Reply) -> None:
        self._bytes_under_way -= len(self._into[self._num_landed])
        self._num_landed += 1
        self._landed(reply)
        if self._num_landed < len(self._keys):
            self.ask()
        elif self._rest:
            raise RedisConnectionError("more answers than questions")
        elif not self.all_there.done():
            self.all_there.set_result(None)

    def _fail(self, error: Exception) -> None:
        if not self.all_there.done():
            self.all_there.set_exception(error)


def reply_of(value: object, buffer: memoryview) -> Reply:
    """Of a value that has come as an object; its leading bytes go to the buffer."""
    if not isinstance(value, bytes):
        return None
    if not 0 <= len(value) - len(buffer) <= MAX_TAIL_BYTES:
        return Misfit()
    buffer[:] = memoryview(value)[: len(buffer)]
    return Landed(value[len(buffer) :])

"""Values of Redis are received straight into their buffers, whatever the server answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError
from waiting import until

from prefix_store.redis_fetch import Landed, Misfit, Reply, fetch, reply_of

ROOM = 10_000


class Script:
    """A server that sends `answer`, in pieces, whatever it is asked; and then answers PING."""

    def __init__(self, answer: bytes, piece_bytes: int, *, hangs_up: bool = False) -> None:
        self._answer, self._piece_bytes, self._hangs_up = answer, piece_bytes, hangs_up
        self.asked = b""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            self.asked += data
            if b"PING" in data:
                writer.write(b"+PONG\r\n")
                continue
            for at in range(0, len(self._answer), self._piece_bytes):
                writer.write(self._answer[at : at + self._piece_bytes])
                await writer.drain()
                await asyncio.sleep(0)
            if self._hangs_up:
                break
            self._answer = b""
        writer.close()


@asynccontextmanager
async def connected(script: Script) -> AsyncIterator[Redis]:
    server = await asyncio.start_server(script.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = Redis(port=port, protocol=2, driver_info=None)
    try:
        yield client
    finally:
        await client.aclose()
        server.close()


async def fetched(
    client: Redis, num_values: int, room: int = ROOM, seen: Callable[[int], None] = lambda n: None
) -> tuple[list[Reply], list[bytes]]:
    """The replies, and what the buffers hold then."""
    replies: list[Reply] = []
    buffers = [bytearray(room) for _ in range(num_values)]

    def landed(reply: Reply) -> None:
        replies.append(reply)
        seen(len(replies))

    pool = client.connection_pool
    connection = await pool.get_connection()
    try:
        keys = [b"k%d" % i for i in range(num_values)]
        await fetch(connection, keys, [memoryview(each) for each in buffers], landed)
    finally:
        await pool.release(connection)
    return replies, [bytes(each) for each in buffers]


def bulk(value: bytes) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(value), value)


@pytest.mark.parametrize("piece_bytes", [1, 7, 4096, 10**6])
async def test_each_answer_is_what_the_server_said(piece_bytes: int) -> None:
    """However the network cuts the stream; and the connection works on afterwards."""
    values = [bytes([i]) * ROOM + b"\r\ntail%d" % i for i in range(3)]
    answers = [
        bulk(values[0]), b"$-1\r\n", bulk(values[1]), b"-NOPERM no rights\r\n",
        bulk(b"short"), bulk(bytes(200_000)), bulk(b""), bulk(values[2]),
    ]  # fmt: skip
    if piece_bytes == 1:
        answers[5] = b"$-1\r\n"  # else it takes long
    script = Script(b"".join(answers), piece_bytes)
    async with connected(script) as client:
        replies, buffers = await fetched(client, len(answers))
        assert await client.ping()
    assert [type(reply) for reply in replies] == [
        Landed, type(None), Landed, ResponseError, Misfit,
        type(None) if piece_bytes == 1 else Misfit, Misfit, Landed,
    ]  # fmt: skip
    assert str(replies[3]) == "NOPERM no rights"
    for i, reply, buffer in zip((0, 1, 2), replies[::2][:2] + replies[7:], [0, 2, 7], strict=True):
        assert reply == Landed(values[i][ROOM:])
        assert buffers[buffer] == values[i][:ROOM]


async def test_a_value_without_a_tail_lands() -> None:
    """It is as long as its buffer."""
    async with connected(Script(bulk(b"x" * ROOM), 999)) as client:
        assert await fetched(client, 1) == ([Landed(b"")], [b"x" * ROOM])


async def test_a_server_that_hangs_up_after_its_last_answer_is_no_fault() -> None:
    """What was asked for is there; the next question gets another connection."""
    async with connected(Script(bulk(b"x" * ROOM), 10**6, hangs_up=True)) as client:
        assert await fetched(client, 1) == ([Landed(b"")], [b"x" * ROOM])
        assert await client.ping()


@pytest.mark.parametrize("cut", [1, 5, 6000, -1])
async def test_a_connection_that_ends_in_the_middle_is_a_fault(cut: int) -> None:
    """In a line, in a value or before the last byte; what came whole before it has landed."""
    answer = bulk(b"a" * ROOM) + bulk(b"b" * ROOM)[:cut]
    seen: list[int] = []
    async with connected(Script(answer, 512, hangs_up=True)) as client:
        with pytest.raises(RedisConnectionError):
            await fetched(client, 2, seen=seen.append)
    assert seen == [1]


@pytest.mark.parametrize(
    "answer", [b"*1\r\n$1\r\nx\r\n", b"$abc\r\n", bulk(b"x" * ROOM) + b"+more\r\n"]
)
async def test_what_no_get_is_answered_with_is_a_fault(answer: bytes) -> None:
    """The stream cannot be trusted any more: the connection goes, the next one works."""
    async with connected(Script(answer, 10**6)) as client:
        with pytest.raises(RedisConnectionError):
            await fetched(client, 1)
        assert await client.ping()


@pytest.mark.parametrize(("num_values", "mebibytes", "asked"), [(20, 1, 4), (3, 6, 1)])
async def test_only_so_much_is_asked_for_at_a_time(
    num_values: int, mebibytes: int, asked: int
) -> None:
    """The server need not hold a long run ready; a value larger than that comes alone."""
    script = Script(b"", 1)
    async with connected(script) as client:
        fetching = asyncio.create_task(fetched(client, num_values, mebibytes * 1024**2))
        await until(lambda: b"GET" in script.asked)
        fetching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetching
    assert script.asked.count(b"GET") == asked


def test_a_value_that_came_as_an_object_lands_alike() -> None:
    """That is how they come from a cluster."""
    buffer = memoryview(bytearray(4))
    assert reply_of(b"abcdef", buffer) == Landed(b"ef")
    assert buffer == b"abcd"
    assert reply_of(b"abc", buffer) == Misfit()
    assert reply_of(None, buffer) is None

"""HTTP to an engine: errors say whose fault it was, and leaving early closes the connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from engine_adapter.base import EngineLostError, EngineTimeoutError, EngineUnreachableError
from engine_adapter.engine_client import EngineClient

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"


@asynccontextmanager
async def client_of(serve: Serve) -> AsyncIterator[EngineClient]:
    """A client of a raw socket server."""

    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(once, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = EngineClient(f"http://127.0.0.1:{port}", max_requests=4, connect_timeout_s=2.0)
    try:
        yield client
    finally:
        await client.close()
        server.close()


def answers(raw: bytes) -> Serve:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(raw)
        await writer.drain()

    return serve


async def test_an_answer_is_read():
    """Status, headers, body; nothing is in flight afterwards."""
    async with client_of(answers(OK)) as client:
        async with client.request("GET", "/x", headers={}) as response:
            assert response.status == 200
            assert client.in_flight == 1
            assert await response.read(100) == b"hello"
            assert response.complete
        assert client.in_flight == 0


async def test_nobody_listens():
    """No connection."""
    client = EngineClient("http://127.0.0.1:9", max_requests=1, connect_timeout_s=2.0)
    with pytest.raises(EngineUnreachableError):
        async with client.request("GET", "/x", headers={}):
            pass
    assert client.in_flight == 0
    assert not await client.healthy(1.0)
    await client.close()


@pytest.mark.parametrize("raw", [b"", b"HTTP/1.1 200 OK\r\nContent-", b"nonsense\r\n\r\n"])
async def test_no_head(raw):
    """The engine hung up, or spoke something else."""
    async with client_of(answers(raw)) as client:
        with pytest.raises(EngineLostError):
            async with client.request("GET", "/x", headers={}):
                pass
        assert client.in_flight == 0


async def test_torn_body():
    """Shorter than announced."""
    raw = b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nhello"
    async with (
        client_of(answers(raw)) as client,
        client.request("GET", "/x", headers={}) as response,
    ):
        with pytest.raises(EngineLostError):
            await response.read(100)


async def test_bodies_are_bounded():
    """An answer that does not end is not collected."""
    async with (
        client_of(answers(OK)) as client,
        client.request("GET", "/x", headers={}) as response,
    ):
        with pytest.raises(EngineLostError, match="over 4 bytes"):
            await response.read(4)


async def test_leaving_early_closes_the_connection():
    """That is how an engine learns that nobody wants its answer."""
    closed = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nhello")
        assert await reader.read() == b""
        closed.set()

    async with client_of(serve) as client:
        async with client.request("GET", "/x", headers={}) as response:
            assert await response.next_chunk() == b"hello"
        async with asyncio.timeout(5):
            await closed.wait()


async def test_nothing_is_added_to_the_headers():
    """No compression is asked for, and no user agent of ours is sent."""
    heads: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append((await reader.readuntil(b"\r\n\r\n")).lower())
        writer.write(OK)

    async with (
        client_of(serve) as client,
        client.request("POST", "/x", headers={"X-A": "1"}, body=b"{}") as response,
    ):
        await response.read(100)
    names = {line.split(b":")[0] for line in heads[0].split(b"\r\n")[1:] if line}
    assert names == {b"host", b"x-a", b"content-length"}


async def test_large_bodies_arrive_whole():
    """They are written piece by piece."""
    body = bytes(range(256)) * 8000
    got = asyncio.get_running_loop().create_future()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        got.set_result(await reader.readexactly(len(body)))
        writer.write(OK)

    async with (
        client_of(serve) as client,
        client.request("POST", "/x", headers={}, body=body) as response,
    ):
        await response.read(100)
    assert await got == body


async def test_an_engine_that_hangs_is_not_healthy():
    """A probe has its own time limit."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with client_of(serve) as client:
        assert not await client.healthy(0.05)


def test_timeouts_are_told_apart():
    """The error classes are siblings: catching one never hides another."""
    kinds = (EngineLostError, EngineTimeoutError, EngineUnreachableError)
    assert not any(issubclass(a, b) for a in kinds for b in kinds if a is not b)

"""Probes of an engine over HTTP: each kind of failure is told apart."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from engine_adapter.base import (
    EngineLostError,
    EngineRefusedError,
    EngineTimeoutError,
)
from engine_adapter.engine_client import EngineClient
from engine_adapter.engine_gauges import EngineGauges
from engine_adapter.engine_probe import EngineProbe


@dataclass
class Server:
    """A raw socket server that gives one answer to everything; None: it is silent."""

    answer: bytes | None
    heads: list[bytes] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            self.heads.append(await reader.readuntil(b"\r\n\r\n"))
            if self.answer is None:
                await reader.read()
            else:
                writer.write(self.answer)
                await writer.drain()
        finally:
            writer.close()


def answer(status: int, body: bytes = b"") -> bytes:
    head = f"HTTP/1.1 {status} Whatever\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


@asynccontextmanager
async def probe_of(server: Server) -> AsyncIterator[EngineProbe]:
    """A probe of a server that runs meanwhile."""
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    client = EngineClient(f"http://127.0.0.1:{port}", max_requests=4, connect_timeout_s=2.0)
    try:
        yield EngineProbe(client, "some-model")
    finally:
        await client.close()
        listener.close()
        assert client.in_flight == 0


@pytest.mark.parametrize("status", [200, 302, 404, 503])
async def test_the_status_of_health_is_told(status):
    """Redirects are not followed: an engine has none."""
    server = Server(answer(status))
    async with probe_of(server) as probe:
        assert await probe.health(5.0) == status
    assert server.heads[0].startswith(b"GET /health HTTP/1.1\r\n")


async def test_nothing_listens():
    """Told apart from an engine that cannot be reached: it is not there, for certain."""
    for url in ("http://127.0.0.1:9", "http://localhost:9"):
        client = EngineClient(url, max_requests=1, connect_timeout_s=2.0)
        probe = EngineProbe(client, "some-model")
        with pytest.raises(EngineRefusedError):
            await probe.health(5.0)
        assert await probe.gauges(5.0) is None
        with pytest.raises(EngineRefusedError):
            await probe.compute(5.0)
        await client.close()


async def test_silence_is_a_timeout():
    """Of each question."""
    async with probe_of(Server(None)) as probe:
        with pytest.raises(EngineTimeoutError):
            await probe.health(0.02)
        assert await probe.gauges(0.02) is None
        with pytest.raises(EngineTimeoutError, match="no token"):
            await probe.compute(0.02)


async def test_a_connection_that_breaks_is_lost():
    """In the middle of an answer."""
    async with probe_of(Server(answer(200, b"12345")[:-2])) as probe:
        with pytest.raises(EngineLostError):
            await probe.health(5.0)


async def test_an_endless_answer_is_cut():
    """Probes are bounded in bytes."""
    async with probe_of(Server(answer(200, b"x" * 100_000))) as probe:
        with pytest.raises(EngineLostError):
            await probe.health(5.0)


async def test_gauges_are_read():
    """From /metrics; None where it answers with anything but a page."""
    server = Server(answer(200, b"vllm:num_requests_running 3\n"))
    async with probe_of(server) as probe:
        assert await probe.gauges(5.0) == EngineGauges(running=3)
        server.answer = answer(404, b"vllm:num_requests_running 3\n")
        assert await probe.gauges(5.0) is None
    assert server.heads[0].startswith(b"GET /metrics HTTP/1.1\r\n")


@pytest.mark.parametrize("status", [200, 400, 404])
async def test_an_answer_to_the_shortest_request_is_proof(status):
    """A refusal of the request proves nothing against the engine."""
    server = Server(answer(status, b"{}"))
    async with probe_of(server) as probe:
        await probe.compute(5.0)
    assert server.heads[0].startswith(b"POST /v1/completions HTTP/1.1\r\n")


async def test_an_engine_that_answers_5xx_does_not_compute():
    """As when it takes no more requests."""
    async with probe_of(Server(answer(503))) as probe:
        with pytest.raises(EngineLostError, match="status 503"):
            await probe.compute(5.0)

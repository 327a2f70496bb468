"""Clients that leave, at every stage, with real sockets: the engine's work ends, nothing leaks."""

from __future__ import annotations

import asyncio
import json
import socket
import struct

import pytest

from gateway.accounts.record import Outcome
from policies.config import LimitsConfig


def request_bytes(body: dict) -> bytes:
    raw = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
    return head.encode() + raw


async def connect(gateway):
    return await asyncio.open_connection("127.0.0.1", gateway.port)


def reset(writer) -> None:
    """Leave with RST instead of FIN."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.close()


def close(writer) -> None:
    writer.close()


LEAVINGS = pytest.mark.parametrize("leave", [close, reset])


async def has_records(gateway, count: int) -> None:
    async with asyncio.timeout(10):
        while len(gateway.records.all) < count:  # noqa: ASYNC110 - records come without an event
            await asyncio.sleep(0.001)
    await gateway.settled()


@LEAVINGS
async def test_while_sending_the_body(stub_engine, leave):
    """The engine never hears of it."""
    kit = stub_engine
    async with kit.open_gateway(kit.answers(kit.WHOLE)) as gateway:
        _, writer = await connect(gateway)
        writer.write(request_bytes(kit.chat())[:-5])
        await writer.drain()
        async with asyncio.timeout(10):
            while not gateway.listener.running:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        leave(writer)
        await has_records(gateway, 1)
        assert gateway.records.only.outcome in (Outcome.CANCELLED, Outcome.REFUSED)
        assert gateway.stub.received == []


@LEAVINGS
async def test_while_rendering(stub_engine, leave):
    """Before anything was sent to the engine."""
    kit = stub_engine
    async with kit.open_gateway(kit.answers(kit.WHOLE)) as gateway:
        rendering = asyncio.Event()

        async def forever(body, root):
            rendering.set()
            await asyncio.Event().wait()

        gateway.renderer.chat = forever
        _, writer = await connect(gateway)
        writer.write(request_bytes(kit.chat()))
        await rendering.wait()
        leave(writer)
        await has_records(gateway, 1)
        assert gateway.records.only.outcome is Outcome.CANCELLED
        assert gateway.stub.received == []


@LEAVINGS
async def test_while_waiting_for_a_place(stub_engine, leave):
    """Its place in the queue is free again, and the next in the queue gets its turn."""
    kit = stub_engine
    limits = LimitsConfig(max_concurrent_requests=1, max_waiting_requests=1)
    async with kit.open_gateway(kit.hangs(), limits=limits) as gateway:
        running = asyncio.create_task(gateway.client.post("/v1/chat/completions", json=kit.chat()))
        await gateway.stub.arrived.wait()
        _, writer = await connect(gateway)
        writer.write(request_bytes(kit.chat()))
        async with asyncio.timeout(10):
            while not gateway.places.waiting:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        leave(writer)
        async with asyncio.timeout(10):
            while gateway.places.waiting:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        gateway.stub.release.set()
        async with await running as response:
            assert response.status == 200
        await has_records(gateway, 2)
        assert len(gateway.stub.received) == 1


@LEAVINGS
@pytest.mark.parametrize("stream", [True, False])
async def test_before_the_first_byte(stub_engine, leave, stream):
    """The worst moment: the engine is in prefill. It is told at once."""
    kit = stub_engine
    async with kit.open_gateway(kit.hangs()) as gateway:
        _, writer = await connect(gateway)
        writer.write(request_bytes(kit.chat(stream=stream)))
        await gateway.stub.arrived.wait()
        leave(writer)
        await has_records(gateway, 1)
        assert gateway.stub.aborted == 1
        record = gateway.records.only
        assert record.outcome is Outcome.CANCELLED
        assert record.replica == "engine-0"
        assert record.first_token is None


@LEAVINGS
@pytest.mark.parametrize("read", [1, 2, 3])
async def test_in_the_middle_of_a_stream(stub_engine, leave, read):
    """After the role chunk, the first token, the second."""
    kit = stub_engine
    async with kit.open_gateway(kit.streams_then_hangs(kit.STREAM[:read])) as gateway:
        reader, writer = await connect(gateway)
        writer.write(request_bytes(kit.chat(stream=True)))
        await reader.readuntil(kit.STREAM[read - 1])
        leave(writer)
        await has_records(gateway, 1)
        assert gateway.stub.aborted == 1
        record = gateway.records.only
        assert record.outcome is Outcome.CANCELLED
        assert (record.first_token is not None) == (read > 1)


@LEAVINGS
async def test_while_not_reading(stub_engine, leave):
    """A client that lets megabytes pile up holds the engine back instead of our memory; when it
    goes, the engine's work ends."""
    kit = stub_engine
    token = kit.chunk_of([{"index": 0, "delta": {"content": "x" * 50_000}}])
    sent = 0

    async def floods(stub, request):
        nonlocal sent
        response = await kit_stream(request)
        for _ in range(2000):
            await response.write(token)
            sent += len(token)
        return response

    async with kit.open_gateway(floods) as gateway:
        reader, writer = await connect(gateway)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        writer.transport.pause_reading()
        writer.write(request_bytes(kit.chat(stream=True)))
        await gateway.stub.arrived.wait()
        before = -1
        async with asyncio.timeout(10):
            while sent != before:  # until nothing moves any more
                before = sent
                await asyncio.sleep(0.2)
        assert 0 < sent < 40_000_000
        assert not reader.at_eof()
        leave(writer)
        await has_records(gateway, 1)
        assert gateway.stub.aborted == 1
        assert gateway.records.only.outcome is Outcome.CANCELLED


async def kit_stream(request):
    from aiohttp import web

    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    return response


async def test_that_never_reads_is_dropped_after_a_while(stub_engine):
    """Otherwise it would hold its place for ever."""
    kit = stub_engine
    token = kit.chunk_of([{"index": 0, "delta": {"content": "x" * 50_000}}])

    async def floods(stub, request):
        response = await kit_stream(request)
        while True:
            await response.write(token)

    limits = LimitsConfig(upstream_idle_timeout=0.2)
    async with kit.open_gateway(floods, limits=limits) as gateway:
        _, writer = await connect(gateway)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        writer.transport.pause_reading()
        writer.write(request_bytes(kit.chat(stream=True)))
        await has_records(gateway, 1)
        assert gateway.records.only.outcome is Outcome.CANCELLED
        writer.close()


async def test_that_does_not_read_a_whole_answer_is_dropped_after_a_while(stub_engine):
    """It is the one that was silent, not the engine."""
    kit = stub_engine
    limits = LimitsConfig(upstream_idle_timeout=1.0)  # on a busy machine the engine takes a while
    answer = json.dumps({**kit.WHOLE, "padding": "x" * 20_000_000}).encode()
    async with kit.open_gateway(kit.answers(answer), limits=limits) as gateway:
        _, writer = await connect(gateway)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        writer.transport.pause_reading()
        writer.write(request_bytes(kit.chat()))
        await has_records(gateway, 1)
        assert gateway.records.only.outcome is Outcome.CANCELLED
        writer.close()


async def test_is_not_worth_a_line_in_the_log(stub_engine, caplog):
    """It happens all the time, also just before a write; only the statistics count it."""
    kit = stub_engine
    async with kit.open_gateway(kit.streams(kit.STREAM)) as gateway:
        for i in range(200):
            reader, writer = await connect(gateway)
            writer.write(request_bytes(kit.chat(stream=True)))
            for _ in range(i % 12):
                await asyncio.sleep(0)
            if i % 2:
                await reader.read(10)
            reset(writer)
        await gateway.settled()
    assert {r.outcome for r in gateway.records.all} <= {Outcome.CANCELLED, Outcome.OK}
    assert [r for r in caplog.records if r.name.startswith("gateway")] == []


async def test_after_the_answer_is_complete(stub_engine):
    """That is no cancellation."""
    kit = stub_engine
    async with kit.open_gateway(kit.streams(kit.STREAM)) as gateway:
        for _ in range(20):
            reader, writer = await connect(gateway)
            writer.write(request_bytes(kit.chat(stream=True)))
            await reader.readuntil(kit.DONE)
            writer.close()
        await has_records(gateway, 20)
        assert {r.outcome for r in gateway.records.all} == {Outcome.OK}

"""Routes, bad input and connections that misbehave: each gets a clear answer and nothing breaks."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import logging

import pytest

from gateway.accounts.record import Outcome
from gateway.web.errors import GatewayError
from gateway.web.routes import Route, Routes
from policies.config import LimitsConfig

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("path", "raw", "word"),
    [
        (CHAT, b"", "not valid JSON"),
        (CHAT, b'{"model": "stub-model", ', "not valid JSON"),
        (CHAT, b'{"model": NaN}', "not valid JSON"),
        (CHAT, b'[{"model": "stub-model"}]', "must be a JSON object"),
        (CHAT, b'"text"', "must be a JSON object"),
        (CHAT, b'{"model":"stub-model","messages":[],"x":"\xff"}', "not valid UTF-8"),
        (CHAT, b'{"\xff":1}', "not valid"),
        (CHAT, b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}", "nested too deeply"),
        (CHAT, b'{"messages": []}', "`model` is missing"),
        (CHAT, b'{"model": 7, "messages": []}', "`model` must be a string"),
        (CHAT, b'{"model": null, "messages": []}', "`model` must be a string"),
        (CHAT, b'{"model": "", "messages": []}', "`model` is empty"),
        (CHAT, b'{"model": "stub-model"}', "`messages` is missing"),
        (CHAT, b'{"model": "stub-model", "messages": "hi"}', "`messages` must be an array"),
        (CHAT, b'{"model": "stub-model", "messages": ["hi"]}', "`messages[0]` must be an object"),
        (CHAT, b'{"model": "stub-model", "messages": [], "stream": "yes"}', "`stream` must be"),
        (CHAT, b'{"model":"stub-model","messages":[],"stream_options":1}', "`stream_options` must"),
        (
            CHAT,
            b'{"model":"stub-model","messages":[],"stream_options":{"include_usage":1}}',
            "`stream_options.include_usage` must",
        ),
        (CHAT, b'{"model":"stub-model","messages":[],"model":"other"}', "stands twice"),
        (COMPLETIONS, b'{"model": "stub-model"}', "`prompt` is missing"),
        (COMPLETIONS, b'{"model": "stub-model", "prompt": 5}', "`prompt` must be"),
    ],
)
async def test_bad_input_is_400_with_a_clear_message(stub_engine, caplog, path, raw, word):
    """The field is named, the engine is left alone, no traceback is logged, the server lives."""
    kit = stub_engine
    async with kit.open_gateway(kit.answers(kit.WHOLE)) as gateway:
        async with gateway.client.post(path, data=raw) as response:
            assert response.status == 400
            assert response.headers["x-request-id"]
            error = (await response.json())["error"]
        assert word in error["message"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"
        assert gateway.stub.received == []
        async with gateway.client.post(CHAT, json=kit.chat()) as response:
            assert response.status == 200
        await gateway.settled()
        outcomes = [(r.outcome, r.status) for r in gateway.records.all]
        assert outcomes == [(Outcome.REFUSED, 400), (Outcome.OK, 200)]
    assert not [record for record in caplog.records if record.exc_info]


async def test_unknown_model_is_404_like_openais(stub_engine):
    """The message names what there is."""
    kit = stub_engine
    async with kit.open_gateway(kit.answers(kit.WHOLE)) as gateway:
        body = {"model": "gpt-9", "messages": MESSAGES}
        async with gateway.client.post(CHAT, json=body) as response:
            assert response.status == 404
            error = (await response.json())["error"]
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert kit.MODEL in error["message"]


async def test_unknown_route_is_404_in_the_envelope(stub_engine):
    """With a request id, like every answer."""
    kit = stub_engine
    async with (
        kit.open_gateway(kit.answers(kit.WHOLE)) as gateway,
        gateway.client.get("/v1/nothing", headers={"x-request-id": "mine"}) as response,
    ):
        assert response.status == 404
        assert response.headers["x-request-id"] == "mine"
        assert "/v1/nothing" in (await response.json())["error"]["message"]


async def test_wrong_method_is_405_with_allow(stub_engine):
    """GET of a route that takes POST."""
    kit = stub_engine
    async with (
        kit.open_gateway(kit.answers(kit.WHOLE)) as gateway,
        gateway.client.get(CHAT) as response,
    ):
        assert response.status == 405
        assert response.headers["Allow"] == "POST"
        assert (await response.json())["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("given", ["x" * 129, "caf\u00e9", "a\tb", " "])
async def test_odd_request_ids_are_replaced(stub_engine, given):
    """They would end up in logs and headers."""
    kit = stub_engine
    async with (
        kit.open_gateway(kit.answers(kit.WHOLE)) as gateway,
        gateway.client.get("/healthz", headers={"x-request-id": given}) as response,
    ):
        assert response.headers["x-request-id"].startswith("req-")


@pytest.mark.parametrize("announced", [True, False])
async def test_bodies_over_the_limit_are_413(stub_engine, announced):
    """50 MB, with a length and without one (chunked); the next request is fine."""
    kit = stub_engine
    size = 50_000_000
    limits = LimitsConfig(max_body=1_000_000)

    async def pieces():
        for _ in range(50):
            yield b"x" * (size // 50)

    async with kit.open_gateway(kit.answers(kit.WHOLE), limits=limits) as gateway:
        data = io.BytesIO(b"x" * size) if announced else pieces()
        async with gateway.client.post(CHAT, data=data) as response:
            assert response.status == 413
            assert "limits.max_body" in (await response.json())["error"]["message"]
        async with gateway.client.post(CHAT, json=kit.chat()) as response:
            assert response.status == 200
        await gateway.settled()
        assert [r.status for r in gateway.records.all] == [413, 200]


async def test_bodies_that_are_read_at_the_same_time_are_bounded_in_bytes(stub_engine):
    """Announced lengths count for nothing, what has arrived does, until a place is taken."""
    kit = stub_engine
    limits = LimitsConfig(max_body=100_000, body_memory=100_000)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 90000\r\n\r\n"
    async with kit.open_gateway(kit.answers(kit.WHOLE), limits=limits) as gateway:
        writers = []
        for _ in range(9):
            _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            writer.write(head + b" " * 11_000)
            writers.append(writer)
        async with asyncio.timeout(5):
            while gateway.body_memory.used_bytes < 99_000:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        body = kit.chat(padding="x" * 2000)
        async with gateway.client.post(CHAT, json=body) as response:
            assert response.status == 429
            assert response.headers["Retry-After"] == "1"
            assert "limits.body_memory" in (await response.json())["error"]["message"]
        for writer in writers:
            writer.close()
        async with asyncio.timeout(5):
            while gateway.body_memory.used_bytes:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        async with gateway.client.post(CHAT, json=body) as response:
            assert response.status == 200
        assert gateway.body_memory.used_bytes == 0


async def test_running_requests_leave_the_memory_of_bodies_to_others(stub_engine):
    """They are bounded by their number."""
    kit = stub_engine
    async with kit.open_gateway(kit.hangs()) as gateway:
        asking = asyncio.create_task(gateway.client.post(CHAT, json=kit.chat()))
        await gateway.stub.arrived.wait()
        assert gateway.body_memory.used_bytes == 0
        gateway.stub.release.set()
        async with await asking as response:
            assert response.status == 200


async def test_body_may_be_announced_with_expect_continue(stub_engine):
    """As curl does for large bodies."""
    kit = stub_engine
    async with (
        kit.open_gateway(kit.answers(kit.WHOLE)) as gateway,
        gateway.client.post(CHAT, json=kit.chat(), expect100=True) as response,
    ):
        assert response.status == 200


async def test_compressed_bodies_are_taken_and_bounded(stub_engine):
    """The engine gets plain JSON; nonsense is 400, a bomb is 413."""
    kit = stub_engine
    limits = LimitsConfig(max_body=100_000)
    headers = {"Content-Encoding": "gzip"}
    good = gzip.compress(json.dumps(kit.chat()).encode())
    async with kit.open_gateway(kit.answers(kit.WHOLE), limits=limits) as gateway:
        for raw, status in (
            (good, 200),
            (b"not gzip at all", 400),
            (good[:20], 400),
            (gzip.compress(b" " * 50_000_000), 413),
        ):
            async with gateway.client.post(CHAT, data=raw, headers=headers) as response:
                assert response.status == status
        assert gateway.stub.received[0].json["messages"] == kit.chat()["messages"]
        assert "Content-Encoding" not in gateway.stub.received[0].headers


async def test_models_are_the_engines(stub_engine):
    """Forwarded as they are."""
    kit = stub_engine
    models = {"object": "list", "data": [{"id": kit.MODEL}]}
    async with (
        kit.open_gateway(kit.answers(models)) as gateway,
        gateway.client.get("/v1/models") as response,
    ):
        assert await response.json() == models
        assert gateway.stub.received[0].path == "/v1/models"


async def test_models_without_an_engine_are_503(stub_engine):
    """Not an internal error."""
    kit = stub_engine
    async with (
        kit.open_gateway(kit.answers({}), engine_url="http://127.0.0.1:9") as gateway,
        gateway.client.get("/v1/models") as response,
    ):
        assert response.status == 503


async def test_probes(stub_engine):
    """Alive without an engine, ready only with one."""
    kit = stub_engine
    async with kit.open_gateway(kit.answers({})) as gateway:
        for path in ("/healthz", "/readyz"):
            async with gateway.client.get(path) as response:
                assert response.status == 200
        async with gateway.client.head("/healthz") as response:
            assert response.status == 200
    async with kit.open_gateway(kit.answers({}), engine_url="http://127.0.0.1:9") as gateway:
        async with gateway.client.get("/healthz") as response:
            assert response.status == 200
        async with gateway.client.get("/readyz") as response:
            assert response.status == 503
            assert (await response.json())["engines"] == {"engine-0": "no answer"}


async def test_mistakes_of_ours_are_500_and_counted(stub_engine, caplog):
    """The client gets the envelope, the log gets the traceback."""
    kit = stub_engine
    async with kit.open_gateway(kit.answers(kit.WHOLE)) as gateway:

        def broken(hashes):
            raise KeyError("a bug")

        gateway.residency.see = broken
        async with gateway.client.post(CHAT, json=kit.chat()) as response:
            assert response.status == 500
            error = (await response.json())["error"]
        assert error["type"] == "server_error"
        assert "bug" not in error["message"]
        assert gateway.app.internal_errors == 1
        assert gateway.places.running == 0
    assert [r for r in caplog.records if r.exc_info]


async def test_a_client_that_has_gone_is_no_error(stub_engine, caplog):
    """Writing to it fails; that is neither counted nor logged."""
    kit = stub_engine

    async def write_to_nobody(exchange):
        raise ConnectionResetError("Cannot write to closing transport")

    async with kit.open_gateway(kit.answers(kit.WHOLE)) as gateway:
        gateway.app._routes = Routes({"/gone": Route("GET", write_to_nobody)})
        async with gateway.client.get("/gone") as response:
            assert response.status == 499
        assert gateway.app.internal_errors == 0
    assert [r for r in caplog.records if r.name.startswith("gateway")] == []


async def test_noise_instead_of_http_is_one_line_in_the_log(stub_engine, caplog):
    """Port scanners and TLS clients are no reason for a traceback."""
    kit = stub_engine
    caplog.set_level(logging.DEBUG)
    async with kit.open_gateway(kit.answers(kit.WHOLE)) as gateway:
        for noise in (b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/9.9\r\n\r\n", b"POST\r\n\r\n"):
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            writer.write(noise + b"\r\n\r\n")
            answer = await reader.read()
            assert b" 400 " in answer.split(b"\r\n")[0]
            writer.close()
        async with gateway.client.get("/healthz") as response:
            assert response.status == 200
    assert not [r for r in caplog.records if r.exc_info]


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 20_000 + b"\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: x\r\nno colon\r\n\r\n",
    ],
)
async def test_broken_http_is_answered_like_every_error(stub_engine, caplog, head):
    """Envelope, request id and our name; the connection ends, the log has one line."""
    kit = stub_engine
    caplog.set_level(logging.INFO)
    async with kit.open_gateway(kit.answers(kit.WHOLE)) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(head)
        answer = await reader.read()
        writer.close()
    first, _, body = answer.partition(b"\r\n\r\n")
    status, *headers = first.split(b"\r\n")
    assert b" 400 " in status
    named = dict(header.lower().split(b": ", 1) for header in headers)
    assert named[b"server"] == b"headstart"
    assert named[b"x-request-id"].startswith(b"req-")
    assert named[b"content-type"].startswith(b"application/json")
    error = json.loads(body)["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith("the request is not valid HTTP: ")
    assert "\n" not in error["message"]
    lines = [r for r in caplog.records if r.name == "gateway.http"]
    assert [r.exc_info for r in lines] == [None]


async def test_connections_over_the_limit_are_turned_away(stub_engine, caplog):
    """With 503 and retry-after; who is connected is served, and who leaves makes room."""
    kit = stub_engine
    ask = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
    limits = LimitsConfig(max_connections=2)
    async with kit.open_gateway(kit.answers(kit.WHOLE), limits=limits) as gateway:
        kept = [await asyncio.open_connection("127.0.0.1", gateway.port) for _ in range(2)]
        for _ in range(5):
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            async with asyncio.timeout(5):
                answer = await reader.read()
            head, _, body = answer.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 503 ")
            assert b"\r\nRetry-After: 1\r\n" in head
            assert b"limits.max_connections" in body
            assert json.loads(body)["error"]["code"] == "unavailable"
            writer.close()
        for reader, writer in kept:
            writer.write(ask)
            await reader.readuntil(b'{"status":"ok"}')
            writer.close()
        async with asyncio.timeout(5):
            while gateway.listener._open:  # noqa: ASYNC110 - closing has no event here
                await asyncio.sleep(0.001)
        async with gateway.client.get("/healthz") as response:
            assert response.status == 200
    assert len([r for r in caplog.records if "max_connections" in r.message]) == 1


async def test_connections_that_close_without_a_request_leave_nothing(stub_engine):
    """No timer waits for the head that never comes."""
    kit = stub_engine
    async with kit.open_gateway(kit.answers(kit.WHOLE)) as gateway:
        for _ in range(10):
            _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            writer.close()
            await writer.wait_closed()
        async with asyncio.timeout(5):
            while gateway.listener._greetings:  # noqa: ASYNC110 - closing has no event here
                await asyncio.sleep(0.001)


@pytest.mark.parametrize("sent", [b"", b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nX-A: "])
async def test_heads_that_never_end_are_hung_up_on(stub_engine, sent):
    """Slow loris at the headers."""
    kit = stub_engine
    limits = LimitsConfig(header_timeout=0.05)
    async with kit.open_gateway(kit.answers(kit.WHOLE), limits=limits) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(sent)
        async with asyncio.timeout(5):
            assert await reader.read() == b""
        writer.close()


async def test_bodies_that_never_end_are_408(stub_engine):
    """Slow loris at the body."""
    kit = stub_engine
    limits = LimitsConfig(header_timeout=0.05)
    async with kit.open_gateway(kit.answers(kit.WHOLE), limits=limits) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{"
        )
        async with asyncio.timeout(5):
            assert b" 408 " in await reader.readline()
        writer.close()
        await gateway.settled()
        assert gateway.records.only.status == 408


async def test_idle_connections_are_closed(stub_engine):
    """After idle_timeout without a request."""
    kit = stub_engine
    limits = LimitsConfig(idle_timeout=0.05)
    async with kit.open_gateway(kit.answers(kit.WHOLE), limits=limits) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        async with asyncio.timeout(5):
            answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 200 ")
        writer.close()


async def test_stop_lets_a_stream_end(stub_engine):
    """Nothing new is accepted, kept connections are told so, the running stream completes."""
    kit = stub_engine
    async with kit.open_gateway(kit.streams_then_hangs(kit.STREAM[:2])) as gateway:
        async with gateway.client.get("/healthz"):
            pass  # leaves a kept connection
        async with gateway.client.post(CHAT, json=kit.chat(stream=True)) as stream:
            kept = await asyncio.open_connection("127.0.0.1", gateway.port)
            kept[1].write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            await kept[0].readuntil(b'{"status":"ok"}')
            gateway.app.draining = gateway.health.draining = True
            stopping = asyncio.create_task(gateway.listener.stop(10.0))
            await asyncio.sleep(0)
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection("127.0.0.1", gateway.port)
            kept[1].write(b"GET /readyz HTTP/1.1\r\nHost: x\r\n\r\n")
            answer = await kept[0].read()
            assert answer.startswith(b"HTTP/1.1 503 ")
            kept[1].close()
            gateway.stub.release.set()
            assert (await stream.read()).endswith(kit.DONE)
        await stopping
        assert gateway.records.only.outcome is Outcome.OK


async def test_stop_cancels_what_does_not_end_in_time(stub_engine):
    """And the engine's work with it."""
    kit = stub_engine
    async with kit.open_gateway(kit.streams_then_hangs(kit.STREAM[:2])) as gateway:
        async with gateway.client.post(CHAT, json=kit.chat(stream=True)):
            await gateway.listener.stop(0.01)
        await gateway.settled()
        assert gateway.stub.aborted == 1
        assert gateway.records.only.outcome is Outcome.CANCELLED


async def test_requests_on_kept_connections_are_refused_while_stopping(stub_engine):
    """503 with retry-after sends the client to another gateway."""
    kit = stub_engine
    async with kit.open_gateway(kit.answers(kit.WHOLE)) as gateway:
        gateway.app.draining = True
        async with gateway.client.post(CHAT, json=kit.chat()) as response:
            assert response.status == 503
            assert response.headers["Retry-After"] == "1"
            assert response.headers["Connection"] == "close"


def test_every_error_has_a_status_and_an_envelope_type():
    """Walks the tree of errors."""

    def all_below(kind):
        for below in kind.__subclasses__():
            yield below
            yield from all_below(below)

    kinds = list(all_below(GatewayError))
    expected = {400, 401, 403, 404, 405, 408, 409, 413, 429, 502, 503, 504}
    assert {kind.status for kind in kinds} == expected
    assert all(kind.type for kind in kinds)


async def test_answers_in_the_middle_of_json_escapes(stub_engine):
    """A client that talks about usage and errors is not mistaken for the engine."""
    kit = stub_engine
    tricky = kit.chunk_of(
        [{"index": 0, "delta": {"content": '{"usage":1,"error":2} data: [DONE]'}}]
    )
    chunks = [kit.ROLE, kit.TOKEN_A, tricky, kit.LAST, kit.DONE]
    async with kit.open_gateway(kit.streams(chunks)) as gateway:
        async with gateway.client.post(CHAT, json=kit.chat(stream=True)) as response:
            assert await response.read() == kit.ROLE + kit.TOKEN_A + tricky + kit.DONE
        await gateway.settled()
        assert gateway.records.only.outcome is Outcome.OK
    assert json.loads(tricky[6:])

"""The straight line of a request, in front of a stub engine."""

from __future__ import annotations

import io
import json

import pytest

from engine_adapter.base import RenderingError
from gateway.accounts.record import Outcome
from policies.config import LimitsConfig
from prefix_store.events import BlocksLoaded
from prefix_store.hashing import routing_root
from prefix_store.residency import Holder, Match, Medium

CHAT = "/v1/chat/completions"
DEVICE = Holder("engine-0", Medium.DEVICE)


async def test_body_goes_to_the_engine_with_only_our_keys_changed(stub_engine):
    """Order, unknown fields and the bytes of every value stay; salt and usage options are ours."""
    raw = (
        b'{"messages": [ {"content":"a\\u00e9 \xc3\xa9", "role":"user"} ], "x_unknown":[1.0, 2e0],'
        b'"model":"stub-model","cache_salt":"mine","kv_transfer_params":{"a":1},'
        b'"vllm_xargs":{"k": "v"}, "temperature":0.50}'
    )
    async with stub_engine.open_gateway(stub_engine.answers(stub_engine.WHOLE)) as gateway:
        async with gateway.client.post(CHAT, data=raw) as response:
            assert response.status == 200
        sent = gateway.stub.received[0].body
    salt = json.loads(sent)["cache_salt"]
    report_id = json.loads(sent)["kv_transfer_params"]["headstart.request_id"]
    assert salt != "mine"
    assert sent == (
        b'{"messages":[ {"content":"a\\u00e9 \xc3\xa9", "role":"user"} ],"x_unknown":[1.0, 2e0],'
        b'"model":"stub-model","cache_salt":"' + salt.encode() + b'",'
        b'"vllm_xargs":{"k": "v"},"temperature":0.50,'
        b'"kv_transfer_params":{"headstart.request_id":"' + report_id.encode() + b'",'
        b'"headstart.facts":{"tenant":"default","model":"stub-model","session":"","prefix":"",'
        b'"turn":0,"num_tokens":100}}}'
    )


async def test_every_request_gets_a_report_id_of_its_own(stub_engine):
    """Also when clients send the same x-request-id; it is not the client's to choose."""
    kit = stub_engine
    theirs = {"headstart.request_id": "x", "headstart.facts": {}, "do_remote_prefill": True}
    body = kit.chat(kv_transfer_params=theirs)
    async with kit.open_gateway(kit.answers(kit.WHOLE)) as gateway:
        for _ in range(2):
            headers = {"x-request-id": "same"}
            async with gateway.client.post(CHAT, json=body, headers=headers) as response:
                assert response.status == 200
        hints = [received.json["kv_transfer_params"] for received in gateway.stub.received]
    assert all(list(hint) == ["headstart.request_id", "headstart.facts"] for hint in hints)
    assert all(hint["headstart.facts"]["tenant"] == "default" for hint in hints)
    assert len({"x", "same", *(hint["headstart.request_id"] for hint in hints)}) == 4


async def test_usage_is_asked_for_in_every_stream(stub_engine):
    """Other stream options stay, but continuous usage would show up where nobody asked for it."""
    options = {"continuous_usage_stats": True, "other": 1}
    async with stub_engine.open_gateway(stub_engine.streams(stub_engine.STREAM)) as gateway:
        body = stub_engine.chat(stream=True, stream_options=options)
        async with gateway.client.post(CHAT, json=body) as response:
            await response.read()
        assert gateway.stub.received[0].json["stream_options"] == {
            "other": 1,
            "include_usage": True,
        }


async def test_continuous_usage_stays_for_who_asked_for_usage(stub_engine):
    """With include_usage the client's options go through as they are."""
    options = {"continuous_usage_stats": True, "include_usage": True}
    async with stub_engine.open_gateway(stub_engine.streams(stub_engine.STREAM)) as gateway:
        body = stub_engine.chat(stream=True, stream_options=options)
        async with gateway.client.post(CHAT, json=body) as response:
            await response.read()
        assert gateway.stub.received[0].json["stream_options"] == options


async def test_stream_without_usage_chunk_for_who_did_not_ask(stub_engine):
    """Everything else passes byte for byte."""
    async with stub_engine.open_gateway(stub_engine.streams(stub_engine.STREAM)) as gateway:
        async with gateway.client.post(CHAT, json=stub_engine.chat(stream=True)) as response:
            body = await response.read()
            assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        kit = stub_engine
        assert body == kit.ROLE + kit.TOKEN_A + kit.TOKEN_B + kit.DONE


async def test_stream_with_usage_chunk_for_who_asked_lacks_only_metrics(stub_engine):
    """The engine's own metrics are ours to read, not the client's."""
    kit = stub_engine
    async with kit.open_gateway(kit.streams(kit.STREAM)) as gateway:
        body = kit.chat(stream=True, stream_options={"include_usage": True})
        async with gateway.client.post(CHAT, json=body) as response:
            got = await response.read()
    assert (
        got == kit.ROLE + kit.TOKEN_A + kit.TOKEN_B + kit.chunk_of([], usage=kit.USAGE) + kit.DONE
    )


@pytest.mark.parametrize("size", [1, 7, 100])
async def test_split_of_the_engines_bytes_does_not_matter(stub_engine, size):
    """Events are found wherever the bytes were cut."""
    kit = stub_engine
    raw = b"".join(kit.STREAM)
    pieces = [raw[i : i + size] for i in range(0, len(raw), size)]
    async with kit.open_gateway(kit.streams(pieces)) as gateway:
        async with gateway.client.post(CHAT, json=kit.chat(stream=True)) as response:
            assert await response.read() == kit.ROLE + kit.TOKEN_A + kit.TOKEN_B + kit.DONE
        await gateway.settled()
        assert gateway.records.only.output_tokens == 2


@pytest.mark.parametrize("whole", [True, False])
async def test_stream_that_comes_in_one_piece_with_its_head(stub_engine, whole):
    """Head and events leave together; one that breaks off after that ends with an error event."""
    kit = stub_engine
    events = kit.STREAM if whole else kit.STREAM[:2]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in events)
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
    head += b"Transfer-Encoding: chunked\r\n\r\n"
    raw = head + chunks + (b"0\r\n\r\n" if whole else b"")
    async with kit.open_gateway(kit.hangs_up(raw)) as gateway:
        async with gateway.client.post(CHAT, json=kit.chat(stream=True)) as response:
            assert response.status == 200
            assert response.headers["x-headstart-replica"] == "engine-0"
            got = await response.read()
        await gateway.settled()
        if whole:
            assert got == kit.ROLE + kit.TOKEN_A + kit.TOKEN_B + kit.DONE
            assert gateway.records.only.outcome is Outcome.OK
        else:
            assert got.startswith(kit.ROLE + kit.TOKEN_A + b'data: {"error"')
            assert gateway.records.only.outcome is Outcome.ENGINE_ERROR


async def test_whole_answer_lacks_only_metrics(stub_engine):
    """All other values are those of the engine, byte for byte."""
    kit = stub_engine
    raw = b'{"id":"x","metrics":{"queue_time_ms":1.0},"choices":[ {"a":1.50} ],"z":"\\u00e9"}'
    async with (
        kit.open_gateway(kit.answers(raw)) as gateway,
        gateway.client.post(CHAT, json=kit.chat()) as response,
    ):
        assert await response.read() == b'{"id":"x","choices":[ {"a":1.50} ],"z":"\\u00e9"}'


async def test_record_of_a_stream(stub_engine):
    """Prompt tokens by source, first token by part: all from what the engine reported."""
    kit = stub_engine
    async with kit.open_gateway(kit.streams(kit.STREAM)) as gateway:
        gateway.loads.report = BlocksLoaded("x", 32, 32, 1, 0.001)
        headers = {"x-request-id": "r-1"}
        async with gateway.client.post(
            CHAT, json=kit.chat(stream=True), headers=headers
        ) as response:
            await response.read()
            assert response.headers["x-headstart-predicted-tokens"] == "64"
            assert "x-headstart-cached-tokens" not in response.headers
            assert response.headers["x-headstart-replica"] == "engine-0"
            assert response.headers["x-request-id"] == "r-1"
        await gateway.settled()
        record = gateway.records.only
    assert record.outcome is Outcome.OK
    assert (record.status, record.stream, record.tenant) == (200, True, "default")
    assert (record.model, record.replica, record.request_id) == (kit.MODEL, "engine-0", "r-1")
    prompt = record.prompt
    assert (prompt.total, prompt.seen, prompt.available, prompt.captured) == (100, 96, 96, 64)
    assert (prompt.delivered_device, prompt.delivered_memory) == (32, 32)
    assert record.output_tokens == 2
    first = record.first_token
    assert (first.queue_s, first.prefill_s) == (0.003, 0.02)
    assert first.ttft_s >= first.gateway_s > 0
    assert not record.rendering_mismatch
    assert not record.unrendered


async def test_record_of_a_whole_answer(stub_engine):
    """Delivered and predicted tokens go into headers; time to first token is the sum of what was
    measured."""
    kit = stub_engine
    async with kit.open_gateway(kit.answers(kit.WHOLE)) as gateway:
        gateway.residency.answer = Match(3, {DEVICE: 1})
        async with gateway.client.post(CHAT, json=kit.chat()) as response:
            assert response.headers["x-headstart-cached-tokens"] == "64"
            assert response.headers["x-headstart-predicted-tokens"] == "32"
        await gateway.settled()
        record = gateway.records.only
    assert record.outcome is Outcome.OK
    assert record.prompt.delivered_device == 64
    first = record.first_token
    assert first.ttft_s == pytest.approx(first.gateway_s + 0.023)
    assert first.delivery_s is None


@pytest.mark.parametrize(
    ("good", "promised", "device", "memory"),
    [
        (32, 32, 32, 32),
        (32, 64, 0, 32),  # one of two blocks failed: it came from nowhere
        (0, 64, 0, 0),
        (0, 32, 32, 0),
        (96, 96, 0, 64),  # of a longer prompt in the same body
        (0, 96, 0, 0),
    ],
)
async def test_what_failed_to_load_is_no_reuse(stub_engine, good, promised, device, memory):
    """The engine counts what was promised as cached, 64 tokens here, but computes the rest."""
    kit = stub_engine
    async with kit.open_gateway(kit.answers(kit.WHOLE)) as gateway:
        gateway.loads.report = BlocksLoaded("x", good, promised, 1, 0.1)
        async with gateway.client.post(CHAT, json=kit.chat()):
            pass
        await gateway.settled()
        record = gateway.records.only
    assert (record.prompt.delivered_device, record.prompt.delivered_memory) == (device, memory)
    assert record.load_s == 0.1


@pytest.mark.parametrize(
    ("disk", "redis", "expected"),
    [(32, 0, (32, 32, 0)), (0, 64, (0, 0, 64)), (32, 32, (0, 32, 32)), (96, 96, (0, 0, 64))],
)
async def test_loads_are_counted_by_tier(stub_engine, disk, redis, expected):
    """The rest of a load was in memory, and no report makes more of it than there was."""
    kit = stub_engine
    async with kit.open_gateway(kit.answers(kit.WHOLE)) as gateway:
        gateway.loads.report = BlocksLoaded("x", 64, 64, 1, 0.1, False, disk, redis)
        async with gateway.client.post(CHAT, json=kit.chat()):
            pass
        await gateway.settled()
        prompt = gateway.records.only.prompt
    assert (prompt.delivered_memory, prompt.delivered_disk, prompt.delivered_redis) == expected
    assert (prompt.delivered_device, prompt.delivered) == (0, 64)


async def test_loads_are_asked_for_by_the_id_that_the_engine_got(stub_engine):
    """Not by the client's: two clients may send the same."""
    kit = stub_engine
    async with kit.open_gateway(kit.answers(kit.WHOLE)) as gateway:
        for _ in range(2):
            headers = {"x-request-id": "same"}
            async with gateway.client.post(CHAT, json=kit.chat(), headers=headers):
                pass
        await gateway.settled()
        sent = [r.json["kv_transfer_params"]["headstart.request_id"] for r in gateway.stub.received]
        assert gateway.loads.asked == sent
    assert len({*sent, "same"}) == 3


async def test_a_block_that_ends_the_prompt_is_not_predicted(stub_engine):
    """The engine computes the last token of a prompt always."""
    kit = stub_engine
    async with kit.open_gateway(kit.streams(kit.STREAM)) as gateway:
        gateway.renderer.num_tokens = 64
        async with gateway.client.post(CHAT, json=kit.chat(stream=True)) as response:
            assert response.headers["x-headstart-predicted-tokens"] == "32"


async def test_rendering_mismatch_is_recorded_and_breaks_nothing(stub_engine):
    """The engine's count is the truth."""
    kit = stub_engine
    async with kit.open_gateway(kit.answers(kit.WHOLE)) as gateway:
        gateway.renderer.num_tokens = kit.NUM_TOKENS + 1
        async with gateway.client.post(CHAT, json=kit.chat()) as response:
            assert response.status == 200
        await gateway.settled()
        assert gateway.records.only.rendering_mismatch
        assert gateway.records.only.prompt.total == kit.NUM_TOKENS


@pytest.mark.parametrize("error", [RenderingError("images"), TypeError("a template's mistake")])
async def test_what_cannot_be_rendered_is_forwarded_all_the_same(stub_engine, error):
    """No prompt, no prediction: that is all."""
    kit = stub_engine
    async with kit.open_gateway(kit.answers(kit.WHOLE)) as gateway:
        gateway.renderer.error = error
        async with gateway.client.post(CHAT, json=kit.chat()) as response:
            assert response.status == 200
        await gateway.settled()
        record = gateway.records.only
    assert record.unrendered
    assert not record.rendering_mismatch
    assert (record.prompt.total, record.prompt.seen, record.prompt.captured) == (100, 0, 0)
    assert record.prompt.delivered_device == 64


async def test_prompts_that_cannot_fit_are_not_tokenized(stub_engine):
    """Megabytes for a context of 8,192 tokens: the engine says what is wrong with them."""
    kit = stub_engine
    async with kit.open_gateway(kit.answers(kit.WHOLE)) as gateway:
        body = kit.chat(messages=[{"role": "user", "content": "x" * 2_000_000}])
        data = io.BytesIO(json.dumps(body).encode())
        async with gateway.client.post(CHAT, data=data) as response:
            assert response.status == 200
        assert gateway.renderer.seen == []
        assert len(gateway.stub.received[0].body) > 2_000_000


async def test_seen_blocks_are_noted_below_the_tenants_root(stub_engine):
    """Another tenant's prompts have another root."""
    kit = stub_engine
    keys = {"key-a": "a", "key-b": "b"}
    async with kit.open_gateway(kit.answers(kit.WHOLE), keys=keys) as gateway:
        salts = []
        for key in keys:
            headers = {"Authorization": f"Bearer {key}"}
            async with gateway.client.post(CHAT, json=kit.chat(), headers=headers):
                pass
            salts.append(gateway.stub.received[-1].json["cache_salt"])
        roots = [root for _, root in gateway.renderer.seen]
        assert roots == [routing_root(kit.MODEL, salt) for salt in salts]
        assert roots[0] != roots[1]
        assert len(gateway.residency.seen) == 2


async def test_completions_route(stub_engine):
    """A prompt as text is rendered, several prompts are only forwarded."""
    kit = stub_engine
    async with kit.open_gateway(kit.answers(kit.WHOLE)) as gateway:
        for prompt in ("hello", ["a", "b"]):
            body = {"model": kit.MODEL, "prompt": prompt}
            async with gateway.client.post("/v1/completions", json=body) as response:
                assert response.status == 200
        await gateway.settled()
        assert [r.unrendered for r in gateway.records.all] == [False, True]
        assert [r.path for r in gateway.stub.received] == ["/v1/completions"] * 2


async def test_headers_that_pass_and_headers_that_do_not(stub_engine):
    """Tracing and session pass; keys, cookies and hop-by-hop headers end here."""
    kit = stub_engine
    given = {
        "traceparent": "00-1-2-01",
        "X-Session-ID": "s1",
        "Authorization": "Bearer secret",
        "Cookie": "a=b",
        "X-Only-Here": "1",
        "Connection": "keep-alive, x-only-here",
        "Accept-Encoding": "gzip",
    }
    async with kit.open_gateway(kit.answers(kit.WHOLE, headers={"x-engine": "e"})) as gateway:
        async with gateway.client.post(CHAT, json=kit.chat(), headers=given) as response:
            assert response.headers["x-engine"] == "e"
            assert response.headers["Server"] == "headstart"
            request_id = response.headers["x-request-id"]
        sent = gateway.stub.received[0].headers
    assert sent["traceparent"] == "00-1-2-01"
    assert sent["x-session-id"] == "s1"
    assert sent["X-Request-Id"] == request_id
    for name in ("Authorization", "Cookie", "X-Only-Here", "Accept-Encoding"):
        assert name not in sent


@pytest.mark.parametrize(
    ("status", "outcome"),
    [(400, Outcome.REFUSED), (422, Outcome.REFUSED), (500, Outcome.ENGINE_ERROR)],
)
async def test_engine_errors_pass_in_openais_envelope(stub_engine, status, outcome):
    """Status and body are the engine's; the client's mistakes are not booked as the engine's."""
    kit = stub_engine
    error = {
        "error": {"message": "too long", "type": "BadRequestError", "param": None, "code": status}
    }
    async with kit.open_gateway(kit.answers(error, status=status)) as gateway:
        async with gateway.client.post(CHAT, json=kit.chat(stream=True)) as response:
            assert response.status == status
            assert await response.json() == error
            assert response.headers["x-request-id"]
        await gateway.settled()
        assert gateway.records.only.outcome is outcome
        assert gateway.records.only.status == status


async def test_engine_errors_in_another_form_are_wrapped(stub_engine):
    """A web framework's own error becomes an envelope too; 503 says when to come back."""
    kit = stub_engine
    async with (
        kit.open_gateway(kit.answers({"detail": "busy"}, status=503)) as gateway,
        gateway.client.post(CHAT, json=kit.chat()) as response,
    ):
        assert response.status == 503
        assert (await response.json())["error"]["message"] == "busy"
        assert response.headers["Retry-After"] == "1"


async def test_unreachable_engine_is_503_with_retry_after(stub_engine):
    """Nobody listens at the engine's address."""
    kit = stub_engine
    async with kit.open_gateway(kit.answers(kit.WHOLE), engine_url="http://127.0.0.1:9") as gateway:
        async with gateway.client.post(CHAT, json=kit.chat()) as response:
            assert response.status == 503
            assert response.headers["Retry-After"] == "1"
            assert (await response.json())["error"]["code"] == "unavailable"
        await gateway.settled()
        assert gateway.records.only.outcome is Outcome.ENGINE_ERROR


async def test_unreachable_engine_is_passed_over(stub_engine, caplog):
    """The next replica gets the request; a little later nobody tries the dead one first."""
    kit = stub_engine
    async with kit.open_gateway(
        kit.answers(kit.WHOLE), engine_url="http://127.0.0.1:9", with_spare=True
    ) as gateway:
        gateway.residency.answer = Match(3, {DEVICE: 3})
        for _ in range(2):
            async with gateway.client.post(CHAT, json=kit.chat()) as response:
                assert response.status == 200
                assert response.headers["x-headstart-replica"] == "engine-1"
        await gateway.settled()
        assert [r.replica for r in gateway.records.all] == ["engine-1"] * 2
        assert {r.outcome for r in gateway.records.all} == {Outcome.OK}
    assert len([r for r in caplog.records if "engine-0" in r.message]) == 1


async def test_engine_that_dies_before_the_first_byte_is_502(stub_engine):
    """Nothing was promised yet, so the status can tell."""
    kit = stub_engine
    async with (
        kit.open_gateway(kit.hangs_up()) as gateway,
        gateway.client.post(CHAT, json=kit.chat(stream=True)) as response,
    ):
        assert response.status == 502
        assert (await response.json())["error"]["code"] == "engine_error"


async def test_engine_that_dies_in_a_whole_answer_is_502(stub_engine):
    """A torn body is never passed on."""
    kit = stub_engine
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
    async with (
        kit.open_gateway(kit.hangs_up(head)) as gateway,
        gateway.client.post(CHAT, json=kit.chat()) as response,
    ):
        assert response.status == 502


@pytest.mark.parametrize("end", [True, False])
async def test_engine_that_dies_in_a_stream_ends_it_with_an_error_event(stub_engine, end):
    """The client sees an error and no [DONE], also when the engine closes politely."""
    kit = stub_engine
    async with kit.open_gateway(kit.streams(kit.STREAM[:2], end=end)) as gateway:
        async with gateway.client.post(CHAT, json=kit.chat(stream=True)) as response:
            body = await response.read()
        assert body.startswith(kit.ROLE + kit.TOKEN_A + b'data: {"error":{"message":')
        assert b"[DONE]" not in body
        await gateway.settled()
        assert gateway.records.only.outcome is Outcome.ENGINE_ERROR
        assert gateway.records.only.status == 200


async def test_error_event_of_the_engine_passes_and_counts(stub_engine):
    """The engine may fail in the middle and still end its stream properly."""
    kit = stub_engine
    failure = kit.event({"error": {"message": "boom", "type": "x", "param": None, "code": 500}})
    async with kit.open_gateway(kit.streams([kit.ROLE, failure, kit.DONE])) as gateway:
        async with gateway.client.post(CHAT, json=kit.chat(stream=True)) as response:
            assert await response.read() == kit.ROLE + failure + kit.DONE
        await gateway.settled()
        assert gateway.records.only.outcome is Outcome.ENGINE_ERROR


async def test_silent_engine_is_504(stub_engine):
    """Before the first byte."""
    kit = stub_engine
    limits = LimitsConfig(upstream_idle_timeout=0.05)
    async with kit.open_gateway(kit.hangs(), limits=limits) as gateway:
        async with gateway.client.post(CHAT, json=kit.chat()) as response:
            assert response.status == 504
        await gateway.settled()
        assert gateway.stub.aborted == 1


async def test_engine_that_falls_silent_in_a_stream_ends_it_with_an_error_event(stub_engine):
    """The engine's work is aborted, too."""
    kit = stub_engine
    limits = LimitsConfig(upstream_idle_timeout=0.05)
    async with kit.open_gateway(kit.streams_then_hangs(kit.STREAM[:2]), limits=limits) as gateway:
        async with gateway.client.post(CHAT, json=kit.chat(stream=True)) as response:
            body = await response.read()
        assert b'"code":"engine_timeout"' in body
        await gateway.settled()
        assert gateway.stub.aborted == 1


async def test_too_many_requests_are_429_with_retry_after(stub_engine):
    """One runs, none may wait."""
    kit = stub_engine
    limits = LimitsConfig(max_concurrent_requests=1, max_waiting_requests=0)
    async with kit.open_gateway(kit.streams_then_hangs([kit.ROLE]), limits=limits) as gateway:
        async with gateway.client.post(CHAT, json=kit.chat(stream=True)) as first:
            async with gateway.client.post(CHAT, json=kit.chat()) as second:
                assert second.status == 429
                assert second.headers["Retry-After"] == "1"
            gateway.stub.release.set()
            await first.read()
        await gateway.settled()
        assert [r.outcome for r in gateway.records.all] == [Outcome.REFUSED, Outcome.OK]
        assert len(gateway.stub.received) == 1


async def test_waiting_too_long_is_503_with_retry_after(stub_engine):
    """The queue has an end in time as well."""
    kit = stub_engine
    limits = LimitsConfig(max_concurrent_requests=1, max_wait=0.02)
    async with kit.open_gateway(kit.streams_then_hangs([kit.ROLE]), limits=limits) as gateway:
        async with (
            gateway.client.post(CHAT, json=kit.chat(stream=True)),
            gateway.client.post(CHAT, json=kit.chat()) as second,
        ):
            assert second.status == 503
            assert second.headers["Retry-After"] == "1"
        await gateway.settled()


async def test_unknown_key_is_401_when_tenants_are_configured(stub_engine):
    """Before the body is even read."""
    kit = stub_engine
    async with kit.open_gateway(kit.answers(kit.WHOLE), keys={"key-a": "a"}) as gateway:
        for headers in ({}, {"Authorization": "Bearer nope"}, {"Authorization": "key-a"}):
            async with gateway.client.post(CHAT, json=kit.chat(), headers=headers) as response:
                assert response.status == 401
                assert (await response.json())["error"]["code"] == "invalid_api_key"
        async with gateway.client.get("/v1/models") as response:
            assert response.status == 401
        assert gateway.stub.received == []
        assert {r.outcome for r in gateway.records.all} == {Outcome.REFUSED}

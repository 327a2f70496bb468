"""What the gateway relies on in an engine, tried on the simulated one and on the real vLLM.

What holds here for both, the gateway cannot use to tell them apart.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from live_stack import KV_BLOCKS, LiveStack, free_ports
from waiting import until

from engine_adapter.engine_client import EngineClient
from engine_adapter.engine_gauges import EngineGauges
from engine_adapter.event_subscriber import EventSubscriber
from engine_adapter.simulated.engine import SimulatedEngine, running
from engine_adapter.simulated.options import SimulationOptions
from engine_adapter.simulated.words import HashedWords
from gateway.request.answer import Chunk, read_answer, read_chunk
from gateway.request.sse import DONE, SseScanner, event_data
from gateway.request.stream_watch import StreamWatch
from prefix_store.event_source import EventSource
from prefix_store.hashing import as_token_ids, extend_chain, routing_root
from prefix_store.residency import Holder, Medium, Residency

BLOCK = 32
MAX_MODEL_LEN = 8192

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
DEVICE = Holder("engine-0", Medium.DEVICE)

# The members of vLLM 0.32's answers, in its order.
ANSWER = [
    "id",
    "object",
    "created",
    "model",
    "choices",
    "service_tier",
    "system_fingerprint",
    "usage",
    "kv_transfer_params",
    "ec_transfer_params",
    "metrics",
]
CHAT_ANSWER = [*ANSWER[:8], "prompt_logprobs", "prompt_token_ids", "prompt_text", *ANSWER[8:]]
CHAT_CHOICE = [
    "index",
    "message",
    "logprobs",
    "finish_reason",
    "stop_reason",
    "token_ids",
    "routed_experts",
]
CHOICE = [
    "index",
    "text",
    "logprobs",
    "finish_reason",
    "stop_reason",
    "token_ids",
    "prompt_logprobs",
    "prompt_token_ids",
    "routed_experts",
]
MESSAGE = ["role", "content", "refusal", "annotations", "audio", "function_call", "reasoning"]
USAGE = [
    "prompt_tokens",
    "total_tokens",
    "completion_tokens",
    "prompt_tokens_details",
    "completion_tokens_details",
]
METRICS = [
    "time_to_first_token_ms",
    "generation_time_ms",
    "queue_time_ms",
    "mean_itl_ms",
    "tokens_per_second",
]
CHUNK = ["id", "object", "created", "model", "choices"]
USAGE_CHUNK = [*CHUNK, "usage", "system_fingerprint", "metrics"]

_serial = itertools.count(1)

Json = dict[str, Any]


class Engine:
    """An engine that runs, and a client of it."""

    def __init__(self, url: str, model: str, events: str, replay: str) -> None:
        self.url = url
        self.model = model
        self.events = events
        self.replay = replay
        self._session = aiohttp.ClientSession()

    async def aclose(self) -> None:
        await self._session.close()

    async def get(self, path: str) -> bytes:
        async with self._session.get(self.url + path) as response:
            assert response.status == 200
            return await response.read()

    async def post(self, path: str, body: Json | bytes, **headers: str) -> tuple[int, Json]:
        """Status and body."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json", **headers}
        async with self._session.post(self.url + path, data=data, headers=headers) as response:
            return response.status, await response.json()

    async def complete(self, prompt: Any, **fields: Any) -> Json:
        """A short greedy completion."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": 2, "temperature": 0}
        status, answer = await self.post(COMPLETIONS, {**body, **fields})
        assert status == 200, answer
        return answer

    async def cached_tokens(self, prompt: list[int], **fields: Any) -> int:
        usage = (await self.complete(prompt, **fields))["usage"]
        cached: int = usage["prompt_tokens_details"]["cached_tokens"]
        return cached

    @contextlib.asynccontextmanager
    async def stream(self, path: str, body: Json) -> AsyncIterator[aiohttp.StreamReader]:
        async with self._session.post(self.url + path, json={**body, "stream": True}) as response:
            assert response.status == 200
            assert response.headers["content-type"].startswith("text/event-stream")
            yield response.content

    async def events_of(self, path: str, body: Json) -> list[bytes]:
        """The data of all events of a stream."""
        scanner, data = SseScanner(), []
        async with self.stream(path, body) as content:
            async for chunk in content.iter_any():
                data += [event_data(event) for event in scanner.feed(chunk)]
        assert scanner.flush() == b""
        return data

    async def gauges(self) -> EngineGauges:
        return EngineGauges.parse(await self.get("/metrics"))

    async def is_idle(self) -> bool:
        gauges = await self.gauges()
        return (gauges.running, gauges.waiting) == (0, 0)


class Follower:
    """What a gateway learns from the events of an engine."""

    def __init__(self, engine: Engine) -> None:
        self._model = engine.model
        self.residency = Residency(64 * 1024**2)
        self.source = EventSource("engine-0", self.residency, model=engine.model, block_size=BLOCK)
        self.subscriber = EventSubscriber("engine-0", engine.events, engine.replay, self.source)

    def held(self, tokens: list[int], salt: str = "") -> int:
        """Blocks of a prompt that the engine has, from its start."""
        chain = extend_chain(routing_root(self._model, salt), as_token_ids(tokens), BLOCK)
        return self.residency.match(chain).by_holder.get(DEVICE, 0)


@contextlib.asynccontextmanager
async def following(engine: Engine) -> AsyncIterator[Follower]:
    follower = Follower(engine)
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(follower.subscriber.run())
        await until(lambda: not follower.subscriber.state().lacking)
        yield follower
        task.cancel()


OpenEngine = Callable[[], AbstractAsyncContextManager[Engine]]


@contextlib.asynccontextmanager
async def _simulated(directory: Path) -> AsyncIterator[Engine]:
    (port,) = free_ports(1)
    options = SimulationOptions(
        model="simulated",
        block_size=BLOCK,
        kv_tokens=(KV_BLOCKS - 1) * BLOCK,  # vLLM keeps one block for itself
        max_model_len=MAX_MODEL_LEN,
        max_batched_tokens=512,
        speed=10.0,
        events=f"ipc://{directory}/events",
        replay=f"ipc://{directory}/replay",
    )
    simulated = SimulatedEngine(options, HashedWords(), host="127.0.0.1", port=port)
    assert options.events
    assert options.replay
    async with running([simulated]):
        engine = Engine(simulated.url, options.model, options.events, options.replay)
        async with contextlib.aclosing(engine):
            yield engine


@contextlib.asynccontextmanager
async def _real(stack: LiveStack) -> AsyncIterator[Engine]:
    replica = stack.config.engines[0]
    events, replay = stack.paths.engine_events(replica), stack.paths.engine_replay(replica)
    engine = Engine(stack.engine_url, stack.model, events, replay)
    async with contextlib.aclosing(engine):
        await until(engine.is_idle)
        yield engine


@pytest.fixture(params=["simulated", pytest.param("vllm", marks=pytest.mark.engine)])
def open_engine(request: pytest.FixtureRequest, tmp_path: Path) -> OpenEngine:
    """Opens the engine inside the test body."""
    if request.param == "simulated":
        return lambda: _simulated(tmp_path)
    stack = request.getfixturevalue("engine_stack")
    return lambda: _real(stack)


@pytest.fixture
def new_prompt(request: pytest.FixtureRequest) -> Callable[[int], list[int]]:
    """Makes prompts of a given length that share no prefix with any other."""
    name = re.sub(r"\W", "_", request.node.nodeid)

    def make(num_tokens: int) -> list[int]:
        chooser = random.Random(f"{name}/{next(_serial)}")
        return [chooser.randrange(300, 40_000) for _ in range(num_tokens)]

    return make


NewPrompt = Callable[[int], list[int]]


def chat(engine: Engine, words: str, **fields: Any) -> Json:
    """A chat body."""
    messages = [{"role": "user", "content": words}]
    return {"model": engine.model, "messages": messages, "max_tokens": 4, **fields}


async def test_it_is_healthy_and_lists_its_model(open_engine: OpenEngine) -> None:
    """As the gateway's own client sees it."""
    async with open_engine() as engine:
        client = EngineClient(engine.url, max_requests=1, connect_timeout_s=5)
        try:
            assert await client.healthy(5)
        finally:
            await client.close()
        models = json.loads(await engine.get("/v1/models"))
        assert models["object"] == "list"
        (card,) = models["data"]
        assert (card["id"], card["object"]) == (engine.model, "model")
        assert card["max_model_len"] == MAX_MODEL_LEN
        assert card["parent"] is None


async def test_gauges_say_how_busy_it_is(open_engine: OpenEngine) -> None:
    """All that the gateway reads is there, and nothing runs."""
    async with open_engine() as engine:
        gauges = await engine.gauges()
        assert (gauges.running, gauges.waiting, gauges.kv_free) == (0, 0, 1.0)
        assert gauges.kv_tokens is not None
        assert gauges.kv_tokens >= MAX_MODEL_LEN
        assert gauges.generated_tokens is not None
        assert gauges.started_at is not None
        assert gauges.started_at > 1.7e9
        again = await engine.gauges()
        assert not again.restarted_since(gauges)
        await engine.complete([5, 6, 7])
        await until(lambda: _moved(engine, gauges))


async def _moved(engine: Engine, before: EngineGauges) -> bool:
    return (await engine.gauges()).moved_since(before)


async def test_prefix_cache_counters_count_tokens(
    open_engine: OpenEngine, new_prompt: NewPrompt
) -> None:
    """Prompt tokens asked for, and found."""

    def counter(page: bytes, name: str) -> float:
        found = re.search(rf"^vllm:{name}_total\{{.*\}} (\S+)$", page.decode(), re.MULTILINE)
        assert found
        return float(found[1])

    async with open_engine() as engine:
        before = await engine.get("/metrics")
        prompt = new_prompt(100)
        for _ in range(2):
            await engine.complete(prompt)

        async def is_counted() -> bool:
            page = await engine.get("/metrics")
            names = ("prefix_cache_queries", "prefix_cache_hits")
            return [counter(page, n) - counter(before, n) for n in names] == [200.0, 96.0]

        await until(is_counted)


async def test_whole_chat_has_all_members(open_engine: OpenEngine) -> None:
    """Names and order of vLLM's answer; tokens and times as the gateway reads them."""
    async with open_engine() as engine:
        status, answer = await engine.post(CHAT, chat(engine, "good morning to all of you"))
        assert status == 200
        assert list(answer) == CHAT_ANSWER
        assert answer["object"] == "chat.completion"
        assert answer["id"].startswith("chatcmpl-")
        (choice,) = answer["choices"]
        assert list(choice) == CHAT_CHOICE
        assert list(choice["message"]) == MESSAGE
        assert choice["message"]["role"] == "assistant"
        assert list(answer["usage"]) == USAGE
        assert list(answer["metrics"])[:5] == METRICS
        read = read_answer(json.dumps(answer).encode())
        assert read.finish_reason == "length"
        assert read.usage is not None
        assert read.usage.cached_tokens is not None
        assert read.metrics is not None
        assert read.metrics.queue_time_ms is not None
        assert read.metrics.time_to_first_token_ms is not None
        assert read.metrics.time_to_first_token_ms > 0


async def test_whole_completion_has_all_members(
    open_engine: OpenEngine, new_prompt: NewPrompt
) -> None:
    """Likewise; with the token ids, where they are asked for."""
    async with open_engine() as engine:
        prompt = new_prompt(40)
        # Both answers reuse the prompt: another batch may round a near-tie the other way.
        await engine.complete(prompt, max_tokens=1)
        answer = await engine.complete(prompt, max_tokens=3, return_token_ids=True)
        assert list(answer) == ANSWER
        assert answer["object"] == "text_completion"
        assert answer["id"].startswith("cmpl-")
        (choice,) = answer["choices"]
        assert list(choice) == CHOICE
        assert choice["prompt_token_ids"] == prompt
        assert len(choice["token_ids"]) == 3
        assert choice["text"]
        plain = await engine.complete(prompt, max_tokens=3)
        assert plain["choices"][0]["token_ids"] is None
        assert plain["choices"][0]["text"] == choice["text"]


async def test_request_id_becomes_the_answers(open_engine: OpenEngine) -> None:
    """The header X-Request-Id, after the kind of the answer."""
    async with open_engine() as engine:
        body = {"model": engine.model, "prompt": [5, 6], "max_tokens": 1}
        _, answer = await engine.post(COMPLETIONS, body, **{"X-Request-Id": f"r{next(_serial)}"})
        assert re.fullmatch(r"cmpl-r\d+", answer["id"])


async def test_streamed_chat_begins_with_the_role_and_ends_with_usage(
    open_engine: OpenEngine,
) -> None:
    """Role chunk without a token, chunks with tokens, the reason to finish, usage with times,
    [DONE]; and the gateway's own reader finds all of it."""
    async with open_engine() as engine:
        body = chat(engine, "one two three", stream_options={"include_usage": True})
        data = await engine.events_of(CHAT, body)
        assert data[-1] == DONE
        raw = [json.loads(one) for one in data[:-1]]
        chunks = [_chunk(one) for one in data[:-1]]
        assert [list(one)[:5] for one in raw] == [CHUNK] * len(raw)
        assert {one["object"] for one in raw} == {"chat.completion.chunk"}
        assert len({one["id"] for one in raw}) == 1
        assert raw[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert not chunks[0].choices[0].has_token
        assert all(chunk.choices[0].has_token for chunk in chunks[1:-1])
        assert [chunk.choices[0].finish_reason for chunk in chunks[-3:-1]][-1] == "length"
        assert list(raw[-1]) == USAGE_CHUNK
        assert raw[-1]["choices"] == []
        assert list(raw[-1]["metrics"]) == METRICS
        watch = StreamWatch(wants_usage=True)
        for one in data:
            watch.feed(b"data: " + one + b"\n\n")
        assert watch.done
        assert not watch.failed
        assert watch.first_token_at is not None
        assert watch.usage is not None
        assert watch.usage.completion_tokens == 4
        assert watch.usage.cached_tokens is not None
        assert watch.metrics is not None
        assert watch.metrics.time_to_first_token_ms is not None


def _chunk(data: bytes) -> Chunk:
    chunk = read_chunk(data)
    assert chunk is not None
    return chunk


async def test_streamed_completion_equals_the_whole_one(
    open_engine: OpenEngine, new_prompt: NewPrompt
) -> None:
    """Its pieces, put together, and its usage; without being asked for, usage stays away."""
    async with open_engine() as engine:
        prompt = new_prompt(40)
        body = {"model": engine.model, "prompt": prompt, "max_tokens": 5, "temperature": 0}
        await engine.post(COMPLETIONS, body)  # cold and warm round differently: both are warm
        _, whole = await engine.post(COMPLETIONS, body)
        options = {"stream_options": {"include_usage": True}}
        data = await engine.events_of(COMPLETIONS, {**body, **options})
        raw = [json.loads(one) for one in data[:-1]]
        assert (
            "".join(c["text"] for one in raw for c in one["choices"])
            == (whole["choices"][0]["text"])
        )
        counts = ("prompt_tokens", "completion_tokens", "total_tokens")
        assert [raw[-1]["usage"][n] for n in counts] == [whole["usage"][n] for n in counts]
        plain = await engine.events_of(COMPLETIONS, body)
        assert plain[-1] == DONE
        assert not any(b'"usage"' in one for one in plain)


async def test_continuous_usage_grows(open_engine: OpenEngine) -> None:
    """Where it is asked for, every chunk says the tokens so far."""
    async with open_engine() as engine:
        options = {"include_usage": True, "continuous_usage_stats": True}
        data = await engine.events_of(CHAT, chat(engine, "a b c", stream_options=options))
        usages = [json.loads(one)["usage"] for one in data[:-1]]
        generated = [usage["completion_tokens"] for usage in usages]
        assert generated[0] == 0
        assert generated[-1] == 4
        assert generated == sorted(generated)
        assert all(
            usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
            for usage in usages
        )


async def test_usage_counts_the_tokens_of_tokenize(open_engine: OpenEngine) -> None:
    """For chats and for text."""
    async with open_engine() as engine:
        body = chat(engine, "how many tokens are these words")
        _, answer = await engine.post(CHAT, body)
        _, tokens = await engine.post("/tokenize", body)
        assert list(tokens) == ["count", "max_model_len", "tokens", "token_strs"]
        assert tokens["count"] == len(tokens["tokens"]) == answer["usage"]["prompt_tokens"]
        assert tokens["max_model_len"] == MAX_MODEL_LEN
        text = "and these"
        _, tokens = await engine.post("/tokenize", {"model": engine.model, "prompt": text})
        by_text = await engine.complete(text, return_token_ids=True)
        assert by_text["choices"][0]["prompt_token_ids"] == tokens["tokens"]
        assert by_text["usage"]["prompt_tokens"] == tokens["count"]


async def test_several_prompts_and_answers_add_up(
    open_engine: OpenEngine, new_prompt: NewPrompt
) -> None:
    """One choice each, in order; no times, which would belong to none of them."""
    async with open_engine() as engine:
        prompts = [new_prompt(10), new_prompt(20)]
        answer = await engine.complete(prompts, n=2, temperature=1, max_tokens=3)
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        usage = answer["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (30, 12)
        assert answer["metrics"] is None
        body = {"model": engine.model, "prompt": prompts, "max_tokens": 3}
        options = {"stream_options": {"include_usage": True}}
        data = await engine.events_of(COMPLETIONS, {**body, **options})
        last = json.loads(data[-2])
        assert last["usage"]["completion_tokens"] == 6
        assert "metrics" not in last


@pytest.mark.parametrize("extra", [0, 1, BLOCK - 1])
async def test_repetition_is_cached_in_whole_blocks(
    open_engine: OpenEngine, new_prompt: NewPrompt, extra: int
) -> None:
    """And at least one token is computed, so a prompt that ends with a block loses that one."""
    async with open_engine() as engine:
        prompt = new_prompt(3 * BLOCK + extra)
        assert await engine.cached_tokens(prompt) == 0
        assert await engine.cached_tokens(prompt) == (len(prompt) - 1) // BLOCK * BLOCK
        assert await engine.cached_tokens([*prompt, 5]) == 3 * BLOCK
        assert await engine.cached_tokens(prompt[: 2 * BLOCK + 1]) == 2 * BLOCK


async def test_salts_share_nothing(open_engine: OpenEngine, new_prompt: NewPrompt) -> None:
    """A prompt is cached below its own salt only."""
    async with open_engine() as engine:
        prompt = new_prompt(100)
        assert await engine.cached_tokens(prompt, cache_salt="one") == 0
        assert await engine.cached_tokens(prompt, cache_salt="two") == 0
        assert await engine.cached_tokens(prompt) == 0
        assert await engine.cached_tokens(prompt, cache_salt="one") == 96


async def test_answers_are_cached_for_the_next_turn(
    open_engine: OpenEngine, new_prompt: NewPrompt
) -> None:
    """All tokens but the last, which was never computed."""
    async with open_engine() as engine:
        prompt = new_prompt(30)
        answer = await engine.complete(
            prompt, max_tokens=36, return_token_ids=True, ignore_eos=True
        )
        tokens = prompt + answer["choices"][0]["token_ids"]
        assert len(tokens) == 66
        assert await engine.cached_tokens([*tokens, 5, 6]) == 64
        again = await engine.complete(prompt, max_tokens=35, ignore_eos=True, cache_salt="s",
                                      return_token_ids=True)  # fmt: skip
        tokens = prompt + again["choices"][0]["token_ids"][:34]
        assert len(tokens) == 64
        assert await engine.cached_tokens([*tokens, 5, 6], cache_salt="s") == 64


async def test_events_rebuild_what_is_cached(
    open_engine: OpenEngine, new_prompt: NewPrompt
) -> None:
    """Before each request the events say how much of it is cached, for prompts that extend and
    fork one another, some computed in several chunks, some below a salt."""
    async with open_engine() as engine, following(engine) as follower:
        trunk, branch = new_prompt(700), new_prompt(300)
        prompts = [trunk[:100], trunk, trunk[:350] + branch, trunk + branch, trunk[:384], branch]
        for prompt, salt in itertools.product(prompts, ["", "pepper"]):
            fields = {"cache_salt": salt} if salt else {}
            most = (len(prompt) - 1) // BLOCK
            known = min(follower.held(prompt, salt), most) * BLOCK
            assert await engine.cached_tokens(prompt, **fields) == known
            await until(lambda p=prompt, s=salt: follower.held(p, s) >= len(p) // BLOCK)
        stats = follower.source.stats()
        assert (stats.orphans, stats.malformed, stats.refused, stats.foreign_groups) == (0,) * 4


async def test_eviction_is_announced(open_engine: OpenEngine, new_prompt: NewPrompt) -> None:
    """What others pushed out is resident no more, its tail first; what is left is still cached."""
    async with open_engine() as engine, following(engine) as follower:
        await engine.post("/reset_prefix_cache", b"")  # so that nothing is left of other tests
        first = new_prompt(1000)
        await engine.complete(first, cache_salt="x")
        await until(lambda: follower.held(first, "x") == 31)
        for _ in range(3):
            await engine.complete(new_prompt(3300))  # 103 full blocks and one more
        left = KV_BLOCKS - 1 - 3 * 103 - 1
        await until(lambda: follower.held(first, "x") == left)
        assert await engine.cached_tokens(first[: left * BLOCK + 1], cache_salt="x") == left * BLOCK
        assert follower.source.stats().blocks <= KV_BLOCKS


async def test_late_subscriber_learns_the_same(
    open_engine: OpenEngine, new_prompt: NewPrompt
) -> None:
    """From the replay."""
    async with open_engine() as engine, following(engine) as early:
        prompt = new_prompt(500)
        await engine.complete(prompt)
        await until(lambda: early.held(prompt) == 15)
        async with following(engine) as late:
            await until(lambda: late.held(prompt) == 15)
            blocks = (late.residency.stats().resident_blocks, late.source.stats())
            assert blocks == (early.residency.stats().resident_blocks, early.source.stats())
            assert late.subscriber.state().last_sequence == early.subscriber.state().last_sequence


async def test_full_report_announces_reused_blocks_again(
    open_engine: OpenEngine, new_prompt: NewPrompt
) -> None:
    """Only where the request asks for it."""
    async with open_engine() as engine, following(engine) as follower:
        await engine.post("/reset_prefix_cache", b"")  # so that nothing has to go for it
        prompt = new_prompt(100)
        await engine.complete(prompt, max_tokens=1)
        await until(lambda: follower.held(prompt) == 3)
        events = follower.subscriber.state().events
        await engine.complete(prompt, max_tokens=1)
        marker = new_prompt(40)
        await engine.complete(marker, max_tokens=1)
        await until(lambda: follower.held(marker) == 1)
        assert follower.subscriber.state().events == events + 1
        await engine.complete(prompt, max_tokens=1, vllm_xargs={"kv_cache_report_mode": "full"})
        await until(lambda: follower.subscriber.state().events == events + 2)
        await engine.post("/reset_prefix_cache", b"")  # whoever follows took that for copies


async def test_reset_forgets_everything(open_engine: OpenEngine, new_prompt: NewPrompt) -> None:
    """At once in the engine; the events say it with the next request's."""
    async with open_engine() as engine, following(engine) as follower:
        prompt, following_prompt = new_prompt(100), new_prompt(70)
        await engine.complete(prompt, cache_salt="r")
        await until(lambda: follower.held(prompt, "r") == 3)
        status, answer = await engine.post("/reset_prefix_cache", b"")
        assert (status, answer) == (200, {"success": True})
        await engine.complete(following_prompt)
        await until(lambda: follower.held(following_prompt) == 2)
        assert follower.held(prompt, "r") == 0
        assert follower.source.stats().blocks == 2


@pytest.mark.parametrize("stream", [True, False])
async def test_hanging_up_aborts_what_runs(
    open_engine: OpenEngine, new_prompt: NewPrompt, stream: bool
) -> None:
    """In the middle of an answer."""
    async with open_engine() as engine:
        body = {"model": engine.model, "prompt": new_prompt(40), "max_tokens": 5000,
                "ignore_eos": True, "stream": stream}  # fmt: skip

        async def ask() -> None:
            await engine.post(COMPLETIONS, body)

        client = asyncio.ensure_future(ask())
        await until(lambda: _runs(engine, running=1, waiting=0))
        client.cancel()
        await until(engine.is_idle)
        gauges = await engine.gauges()
        assert gauges.kv_free == 1.0
        assert gauges.generated_tokens is not None
        assert gauges.generated_tokens < 5000


async def test_hanging_up_aborts_what_waits(open_engine: OpenEngine, new_prompt: NewPrompt) -> None:
    """A request whose prompt does not fit beside another one waits, and leaves when its client
    does; the other one goes on."""
    async with open_engine() as engine:
        first, second = (
            {"model": engine.model, "prompt": new_prompt(length), "max_tokens": 3000,
             "ignore_eos": True}
            for length in (5000, 6000)
        )  # fmt: skip
        running_client = asyncio.ensure_future(engine.post(COMPLETIONS, first))
        await until(lambda: _runs(engine, running=1, waiting=0))
        waiting_client = asyncio.ensure_future(engine.post(COMPLETIONS, second))
        await until(lambda: _runs(engine, running=1, waiting=1))
        waiting_client.cancel()
        await until(lambda: _runs(engine, running=1, waiting=0))
        running_client.cancel()
        await until(engine.is_idle)


async def _runs(engine: Engine, *, running: int, waiting: int) -> bool:
    gauges = await engine.gauges()
    return (gauges.running, gauges.waiting) == (running, waiting)


@pytest.mark.parametrize(
    ("path", "fields", "status", "kind", "param"),
    [
        (COMPLETIONS, {"model": "nobody", "prompt": "x"}, 404, "NotFoundError", "model"),
        (CHAT, {"model": "nobody", "messages": []}, 404, "NotFoundError", "model"),
        ("/tokenize", {"model": "nobody", "prompt": "x"}, 404, "NotFoundError", "model"),
        (COMPLETIONS, {}, 400, "BadRequestError", "prompt"),
        (CHAT, {}, 400, "Bad Request", "body.messages"),
        (CHAT, {"messages": "x"}, 400, "Bad Request", "body.messages"),
        (COMPLETIONS, {"prompt": [5] * 9000}, 400, "BadRequestError", "input_tokens"),
        (CHAT, {"messages": [{"role": "user", "content": "a b " * 5000}]},
         400, "BadRequestError", "input_tokens"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 0}, 400, "BadRequestError", "max_tokens"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": "a"}, 400, "Bad Request", "body.max_tokens"),
        (COMPLETIONS, {"prompt": []}, 400, "BadRequestError", None),
        (COMPLETIONS, {"prompt": "x", "cache_salt": ""}, 400, "BadRequestError", "cache_salt"),
        (COMPLETIONS, {"prompt": "x", "cache_salt": "a/b"}, 400, "BadRequestError", "cache_salt"),
    ],
)  # fmt: skip
async def test_mistakes_get_an_envelope(  # noqa: PLR0917 (the columns of the table)
    open_engine: OpenEngine, path: str, fields: Json, status: int, kind: str, param: str | None
) -> None:
    """{error: {message, type, param, code}}, the code being the status."""
    async with open_engine() as engine:
        body = {"model": engine.model, **fields}
        got, answer = await engine.post(path, body)
        assert list(answer) == ["error"]
        error = answer["error"]
        assert list(error) == ["message", "type", "param", "code"]
        assert (got, error["type"], error["param"], error["code"]) == (status, kind, param, status)
        assert error["message"]


async def test_bad_json_gets_an_envelope(open_engine: OpenEngine) -> None:
    """Likewise, and a content type that is not JSON."""
    async with open_engine() as engine:
        got, answer = await engine.post(COMPLETIONS, b"{bad")
        assert (got, answer["error"]["code"], answer["error"]["type"]) == (400, 400, "Bad Request")
        plain = {"content-type": "text/plain"}
        got, answer = await engine.post(COMPLETIONS, b"{}", **plain)
        assert (got, answer["error"]["code"], answer["error"]["type"]) == (400, 400, "Bad Request")


async def test_unknown_routes_have_their_own_shape(open_engine: OpenEngine) -> None:
    """As FastAPI words them."""
    async with open_engine() as engine:
        assert await engine.post("/nowhere", b"") == (404, {"detail": "Not Found"})
        assert await engine.post("/v1/models", b"") == (405, {"detail": "Method Not Allowed"})


async def test_priorities_are_accepted(open_engine: OpenEngine) -> None:
    """Whether they matter is the scheduling policy's business."""
    async with open_engine() as engine:
        answer = await engine.complete([7, 8, 9], priority=3)
        assert answer["usage"]["prompt_tokens"] == 3


async def test_event_sources_are_told(open_engine: OpenEngine) -> None:
    """By GET /kv_event_sources."""
    async with open_engine() as engine:
        (source,) = json.loads(await engine.get("/kv_event_sources")).values()
        assert source["enable_kv_cache_events"] is True
        assert (source["endpoint"], source["replay_endpoint"]) == (engine.events, engine.replay)
        assert (source["topic"], source["buffer_steps"]) == ("kv-events", 10_000)

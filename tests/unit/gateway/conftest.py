"""A stub engine that speaks vLLM's answers, for what a real engine does not do on demand: errors,
odd splits, silence and broken connections. Tests of the main path use the real engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np
import pytest
import uvloop
from aiohttp import web
from replicas import replica_of

from engine_adapter.base import Prompt, RenderingError
from engine_adapter.engine_client import EngineClient
from gateway.accounts.record import RequestRecord
from gateway.fleet.dispatch import Dispatcher
from gateway.fleet.places import Places
from gateway.fleet.replica import Replica
from gateway.fleet.served_models import ServedModels
from gateway.request.ended_calls import EndedCalls
from gateway.request.health import Health
from gateway.request.proxy import Proxy
from gateway.request.request_log import RequestLog
from gateway.request.tenants import Tenants
from gateway.web.app import App
from gateway.web.body_memory import BodyMemory
from gateway.web.listener import Listener
from gateway.web.routes import Route
from policies.config import LimitsConfig, ModelConfig
from policies.engine import EngineConfig
from policies.fleet import CoalescingConfig
from policies.routing import Evidence, LeastTtftRouting, Routing
from prefix_store.base import BlockHash
from prefix_store.events import BlocksLoaded
from prefix_store.hashing import as_token_ids, extend_chain
from prefix_store.residency import Holder, Match, Medium

MODEL = "stub-model"
BLOCK_SIZE = 32
NUM_TOKENS = 100
DEVICE = Holder("engine-0", Medium.DEVICE)
MEMORY = Holder("store-0", Medium.MEMORY)
ELSEWHERE = Holder("engine-1", Medium.DEVICE)

USAGE = {
    "prompt_tokens": NUM_TOKENS,
    "completion_tokens": 2,
    "total_tokens": NUM_TOKENS + 2,
    "prompt_tokens_details": {"cached_tokens": 64, "created_cache_tokens": 32},
}
METRICS = {"time_to_first_token_ms": 20.0, "generation_time_ms": 5.0, "queue_time_ms": 3.0}


def event(value: Any) -> bytes:
    """One event as vLLM writes it."""
    data = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
    return f"data: {data}\n\n".encode()


def chunk_of(choices: list[dict[str, Any]], **more: Any) -> bytes:
    """One chunk of a chat stream."""
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": MODEL}
    return event({**head, "choices": choices, **more})


ROLE = chunk_of([{"index": 0, "delta": {"role": "assistant", "content": ""}}])
TOKEN_A = chunk_of([{"index": 0, "delta": {"content": "Hello"}, "finish_reason": None}])
TOKEN_B = chunk_of([{"index": 0, "delta": {"content": " you"}, "finish_reason": "stop"}])
LAST = chunk_of([], usage=USAGE, metrics=METRICS)
DONE = b"data: [DONE]\n\n"
STREAM = [ROLE, TOKEN_A, TOKEN_B, LAST, DONE]

WHOLE = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hello \u00e9"}}],
    "usage": USAGE,
    "metrics": METRICS,
    "kv_transfer_params": None,
}

Behaviour = Callable[["StubEngine", web.BaseRequest], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class Received:
    """A request as the engine got it."""

    path: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> dict[str, Any]:
        decoded: dict[str, Any] = json.loads(self.body)
        return decoded


@dataclass
class StubEngine:
    """Answers as `behave` says. Tests only."""

    behave: Behaviour
    received: list[Received] = field(default_factory=list)
    running: int = 0
    aborted: int = 0
    """Requests whose client went away before the answer was complete."""
    release: asyncio.Event = field(default_factory=asyncio.Event)
    """Behaviours that hang wait for this."""
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    url: str = ""

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path in ("/health", "/metrics"):
            return web.Response()
        body = b"".join([chunk async for chunk in request.content.iter_any()])
        self.received.append(Received(request.path, request.headers.copy(), body))
        self.running += 1
        self.arrived.set()
        try:
            return await self.behave(self, request)
        except (asyncio.CancelledError, ConnectionError):
            self.aborted += 1
            raise
        finally:
            self.running -= 1


def streams(chunks: Sequence[bytes], *, end: bool = True) -> Behaviour:
    """A stream of `chunks`, each in a piece of its own; `end=False`: cut off after them."""

    async def behave(stub: StubEngine, request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for chunk in chunks:
            await response.write(chunk)
            await asyncio.sleep(0)
        if not end:
            assert request.transport is not None
            request.transport.close()
        return response

    return behave


def streams_then_hangs(chunks: Sequence[bytes]) -> Behaviour:
    """A stream that falls silent after `chunks` until `release` is set."""

    async def behave(stub: StubEngine, request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for chunk in chunks:
            await response.write(chunk)
        await stub.release.wait()
        for chunk in STREAM[len(chunks) :]:
            await response.write(chunk)
        return response

    return behave


def answers(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Behaviour:
    """A whole answer; bytes as they are, anything else as JSON."""

    async def behave(stub: StubEngine, request: web.BaseRequest) -> web.StreamResponse:
        raw = body if isinstance(body, bytes) else json.dumps(body, separators=(",", ":")).encode()
        return web.Response(
            body=raw, status=status, headers={"Content-Type": "application/json", **(headers or {})}
        )

    return behave


def hangs() -> Behaviour:
    """Nothing at all until `release` is set."""

    async def behave(stub: StubEngine, request: web.BaseRequest) -> web.StreamResponse:
        await stub.release.wait()
        return await answers(WHOLE)(stub, request)

    return behave


def hangs_up(after: bytes = b"") -> Behaviour:
    """Closes the connection, perhaps after some raw bytes."""

    async def behave(stub: StubEngine, request: web.BaseRequest) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.write(after)
        request.transport.close()
        return web.Response()

    return behave


class FixedRenderer:
    """Every prompt has NUM_TOKENS tokens; `error` is raised instead where it is set."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.seen: list[tuple[dict[str, Any], BlockHash]] = []
        self.num_tokens = NUM_TOKENS

    async def chat(self, body: Mapping[str, Any], root: BlockHash) -> Prompt:
        if self.error is not None:
            raise self.error
        self.seen.append((dict(body), root))
        tokens = as_token_ids(np.arange(self.num_tokens))
        return Prompt(self.num_tokens, extend_chain(root, tokens, BLOCK_SIZE), [tokens])

    async def completion(self, body: Mapping[str, Any], root: BlockHash) -> Prompt:
        if not isinstance(body["prompt"], str):
            raise RenderingError("several prompts")
        return await self.chat(body, root)


class FixedResidency:
    """Answers `answer` and remembers what was seen."""

    def __init__(self) -> None:
        self.answer = Match(3, {DEVICE: 2, MEMORY: 1, ELSEWHERE: 3})
        self.seen: list[Sequence[BlockHash]] = []

    def see(self, hashes: Sequence[BlockHash]) -> Match:
        self.seen.append(hashes)
        return self.answer

    def match(self, hashes: Sequence[BlockHash]) -> Match:
        return self.answer


class FixedKnowledge:
    """Everything is known exactly; remembers what was answered where."""

    def __init__(self) -> None:
        self.all: list[tuple[str, int]] = []

    def evidence(self, engine_id: str) -> Evidence:
        return Evidence.EXACT

    def answered(self, engine_id: str, hashes: Sequence[BlockHash], now: float) -> None:
        self.all.append((engine_id, len(hashes)))


@dataclass
class FixedFleet:
    """Replicas that nobody watches."""

    replicas: Sequence[Replica]

    def serving(self, model: str) -> Sequence[Replica]:
        return self.replicas


@dataclass
class Records:
    """The accounting of the tests: keeps every record."""

    all: list[RequestRecord] = field(default_factory=list)

    def record(self, record: RequestRecord) -> None:
        self.all.append(record)

    @property
    def only(self) -> RequestRecord:
        (record,) = self.all
        return record


class FixedLoads:
    """Every request loads `report`, until it is None."""

    def __init__(self) -> None:
        self.report: BlocksLoaded | None = None
        self.asked: list[str] = []

    def take(self, request_id: str) -> BlocksLoaded | None:
        self.asked.append(request_id)
        return self.report


@dataclass
class RunningGateway:
    """A gateway in front of a stub engine, and everything a test wants to look at."""

    url: str
    port: int
    stub: StubEngine
    client: aiohttp.ClientSession
    records: Records
    places: Places
    body_memory: BodyMemory
    renderer: FixedRenderer
    residency: FixedResidency
    loads: FixedLoads
    ended: EndedCalls
    app: App
    health: Health
    listener: Listener
    fleet: FixedFleet
    knowledge: FixedKnowledge

    async def settled(self) -> None:
        """Until nothing runs any more, on either side."""
        async with asyncio.timeout(10):
            while (  # noqa: ASYNC110
                self.stub.running or self.listener.running or self.places.running or len(self.ended)
            ):
                await asyncio.sleep(0.001)  # four parties, none of which has an event for it


@asynccontextmanager
async def _listening(
    handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
) -> AsyncIterator[int]:
    server = web.Server(handler, handler_cancellation=True, access_log=None)
    listener = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0)
    try:
        yield listener.sockets[0].getsockname()[1]
    finally:
        listener.close()
        await server.shutdown(0.05)


@asynccontextmanager
async def open_gateway(
    behave: Behaviour,
    *,
    limits: LimitsConfig | None = None,
    keys: Mapping[str, str] | None = None,
    engine_url: str | None = None,
    with_spare: bool = False,
    request_log: RequestLog | None = None,
    routing: Routing | None = None,
) -> AsyncIterator[RunningGateway]:
    """Stub engine, gateway and a client; closed in reverse order. `with_spare`: a second replica,
    engine-1, on the same stub."""
    limits = limits or LimitsConfig()
    stub = StubEngine(behave)
    async with _listening(stub.handle) as engine_port:
        stub.url = f"http://127.0.0.1:{engine_port}"
        engine = EngineClient(
            engine_url or stub.url,
            max_requests=limits.max_concurrent_requests,
            connect_timeout_s=limits.connect_timeout,
        )
        spare = EngineClient(stub.url, max_requests=8, connect_timeout_s=1.0)
        first, second = (
            EngineConfig(id=f"engine-{i}", block_size=BLOCK_SIZE, model=MODEL) for i in range(2)
        )
        replicas = [replica_of(first, engine, (DEVICE, MEMORY), max_wait_s=limits.max_wait)]
        if with_spare:
            replicas.append(
                replica_of(second, spare, (ELSEWHERE, MEMORY), max_wait_s=limits.max_wait)
            )
        fleet = FixedFleet(replicas)
        models = ServedModels([ModelConfig(name=MODEL, max_model_len=8192)])
        for replica in replicas:
            await models.add_replica(replica.config)
        tenants = Tenants(b"s" * 32, keys or {})
        places = Places(
            limits.max_concurrent_requests, limits.max_waiting_requests, limits.max_wait
        )
        body_memory = BodyMemory(limits.body_memory)
        renderer, residency, loads, records = (
            FixedRenderer(),
            FixedResidency(),
            FixedLoads(),
            Records(),
        )
        knowledge = FixedKnowledge()
        ended = EndedCalls(loads, records, wait_s=0.0, log=request_log)
        proxy = Proxy(
            models=models,
            renderers={MODEL: renderer},
            limits=limits,
            max_attempts=3,
            tenants=tenants,
            places=places,
            body_memory=body_memory,
            dispatcher=Dispatcher(
                fleet,
                (routing or LeastTtftRouting()).router(),
                residency,
                knowledge,
                coalescing=CoalescingConfig(),
            ),
            ended=ended,
        )
        health = Health(fleet, tenants, 2.0)
        app = App(
            {
                "/v1/chat/completions": Route("POST", proxy.chat),
                "/v1/completions": Route("POST", proxy.completions),
                "/v1/models": Route("GET", health.models),
                "/healthz": Route("GET", health.healthz, while_draining=True),
                "/readyz": Route("GET", health.readyz, while_draining=True),
            }
        )
        listener = Listener(
            app,
            header_timeout_s=limits.header_timeout,
            idle_timeout_s=limits.idle_timeout,
            max_connections=limits.max_connections,
        )
        port = await listener.start("127.0.0.1", 0)
        url = f"http://127.0.0.1:{port}"
        async with aiohttp.ClientSession(base_url=url) as client:
            try:
                yield RunningGateway(
                    url, port, stub, client, records, places, body_memory,
                    renderer, residency, loads, ended, app, health, listener, fleet, knowledge,
                )  # fmt: skip
            finally:
                await client.close()
                await listener.stop(0.0)
                ended.close()
                await engine.close()
                await spare.close()


class StubKit:
    """The stub engine's vocabulary, since test modules cannot import this file."""

    open_gateway = staticmethod(open_gateway)
    streams = staticmethod(streams)
    streams_then_hangs = staticmethod(streams_then_hangs)
    answers = staticmethod(answers)
    hangs = staticmethod(hangs)
    hangs_up = staticmethod(hangs_up)
    event = staticmethod(event)
    chunk_of = staticmethod(chunk_of)
    ROLE = ROLE
    TOKEN_A = TOKEN_A
    TOKEN_B = TOKEN_B
    LAST = LAST
    DONE = DONE
    STREAM = tuple(STREAM)
    USAGE = USAGE
    METRICS = METRICS
    WHOLE = WHOLE
    MODEL = MODEL
    BLOCK_SIZE = BLOCK_SIZE
    NUM_TOKENS = NUM_TOKENS

    @staticmethod
    def chat(**more: Any) -> dict[str, Any]:
        """A chat request body."""
        return {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **more}


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The loop of production as well: it notices closed connections at other moments."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
def stub_engine() -> StubKit:
    return StubKit()

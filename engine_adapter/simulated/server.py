"""The HTTP side of a simulated engine (engine_adapter.simulated): vLLM's routes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Awaitable, Callable
from http import HTTPStatus

import msgspec
from aiohttp import web

from engine_adapter.simulated.answers import AnswerWriter
from engine_adapter.simulated.faults import Faults
from engine_adapter.simulated.generation import Generation
from engine_adapter.simulated.jobs import JobMaker
from engine_adapter.simulated.metrics import CONTENT_TYPE, metrics_text
from engine_adapter.simulated.options import SimulationOptions
from engine_adapter.simulated.replica import Replica
from engine_adapter.simulated.request import (
    EngineRequest,
    RefusedError,
    Served,
    decoded,
    read_chat,
    read_completion,
)
from engine_adapter.simulated.words import Words

MAX_BODY_BYTES = 64 * 1024**2
_NOT_FOUND = {"detail": "Not Found"}

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class SimulatedServer:
    """Answers HTTP requests with one replica."""

    def __init__(
        self, options: SimulationOptions, replica: Replica, words: Words, faults: Faults
    ) -> None:
        self._options = options
        self._replica = replica
        self._words = words
        self._faults = faults
        self._served = Served(options.model, options.adapters, options.max_model_len)
        self._maker = JobMaker(self._served, words, options.seed, options.answer_tokens)
        self._started_at = time.time()
        self._routes: dict[str, dict[str, Handler]] = {
            "/health": {"GET": self._health},
            "/ping": {"GET": self._health, "POST": self._health},
            "/version": {"GET": self._version},
            "/v1/models": {"GET": self._models},
            "/metrics": {"GET": self._metrics},
            "/kv_event_sources": {"GET": self._event_sources},
            "/tokenize": {"POST": self._tokenize},
            "/reset_prefix_cache": {"POST": self._reset},
            "/v1/chat/completions": {"POST": self._chat},
            "/v1/completions": {"POST": self._completions},
            "/simulate/fault": {"POST": self._fault},
        }

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Any request."""
        methods = self._routes.get(request.path)
        if methods is None:
            return _json(_NOT_FOUND, HTTPStatus.NOT_FOUND)
        handler = methods.get(request.method)
        if handler is None:
            response = _json({"detail": "Method Not Allowed"}, HTTPStatus.METHOD_NOT_ALLOWED)
            response.headers["allow"] = ", ".join(methods)
            return response
        try:
            if request.path != "/simulate/fault":
                await self._faults.meet()
            return await handler(request)
        except RefusedError as error:
            return _json(error.body, error.status)

    async def _health(self, _: web.BaseRequest) -> web.Response:
        return web.Response()

    async def _version(self, _: web.BaseRequest) -> web.Response:
        return _json({"version": "0.32.0"})

    async def _models(self, _: web.BaseRequest) -> web.Response:
        options = self._options
        names: list[tuple[str, str | None]] = [
            (options.model, None),
            *((name, options.model) for name in options.adapters),
        ]
        cards: list[dict[str, object]] = [
            {
                "id": name,
                "object": "model",
                "created": int(self._started_at),
                "owned_by": "vllm",
                "root": name,
                "parent": parent,
                "max_model_len": None if parent else options.max_model_len,
                "permission": [],
            }
            for name, parent in names
        ]
        return _json({"object": "list", "data": cards})

    async def _metrics(self, _: web.BaseRequest) -> web.Response:
        text = metrics_text(self._replica, self._options.model, self._started_at)
        return web.Response(body=text, headers={"content-type": CONTENT_TYPE})

    async def _event_sources(self, _: web.BaseRequest) -> web.Response:
        options = self._options
        if options.events is None:
            return _json(_NOT_FOUND, HTTPStatus.NOT_FOUND)
        source = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": options.events,
            "replay_endpoint": options.replay,
            "buffer_steps": 10_000,
            "hwm": 100_000,
            "max_queue_size": 100_000,
            "topic": "kv-events",
        }
        return _json({"0": source})

    async def _tokenize(self, request: web.BaseRequest) -> web.Response:
        body = decoded(await _body(request))
        if "messages" in body:
            prompt = (await read_chat(body, self._unbounded(), self._words)).prompts[0]
        else:
            self._served.adapter(body.get("model"))
            prompt = await self._words.completion(str(body.get("prompt", "")))
        return _json(
            {
                "count": prompt.size,
                "max_model_len": self._options.max_model_len,
                "tokens": prompt.tolist(),
                "token_strs": None,
            }
        )

    def _unbounded(self) -> Served:
        """As served, for prompts of any length."""
        return Served(self._served.model, self._served.adapters, 2**31)

    async def _reset(self, _: web.BaseRequest) -> web.Response:
        return _json({"success": self._replica.scheduler.reset_cache()})

    async def _fault(self, request: web.BaseRequest) -> web.Response:
        self._faults.set(decoded(await _body(request)))
        return _json({"success": True})

    async def _chat(self, request: web.BaseRequest) -> web.StreamResponse:
        body = decoded(await _body(request))
        return await self._answer(request, await read_chat(body, self._served, self._words))

    async def _completions(self, request: web.BaseRequest) -> web.StreamResponse:
        body = decoded(await _body(request))
        return await self._answer(request, await read_completion(body, self._served, self._words))

    async def _answer(self, request: web.BaseRequest, wanted: EngineRequest) -> web.StreamResponse:
        """A client that leaves cancels this, and with it the generation."""
        options = self._options
        writer = AnswerWriter(
            wanted,
            self._words,
            speed=options.speed,
            block_size=options.block_size,
            stops_by_itself=wanted.max_tokens is None,
            request_id=request.headers.get("X-Request-Id"),
        )
        jobs = self._maker.jobs(wanted)
        chunk_s = options.min_chunk_s * options.speed
        with Generation(self._replica, jobs, streams=wanted.stream, chunk_s=chunk_s) as generation:
            if wanted.stream:
                return await self._stream(request, writer, generation)
            while not await generation.wait():
                pass
            return web.Response(
                body=writer.whole(generation.sequences), content_type="application/json"
            )

    @staticmethod
    async def _stream(
        request: web.BaseRequest, writer: AnswerWriter, generation: Generation
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        with contextlib.suppress(ConnectionResetError):  # the client has left in between
            await response.prepare(request)
            is_complete = False
            while not is_complete:
                is_complete = await generation.wait()
                if news := writer.news(generation.sequences):
                    await response.write(news)
            await response.write_eof()
        return response


async def _body(request: web.BaseRequest) -> bytes:
    raw = bytearray()
    async for chunk in request.content.iter_any():
        raw += chunk
        if len(raw) > MAX_BODY_BYTES:
            raise RefusedError(f"the body is over {MAX_BODY_BYTES} bytes")
    kind = request.headers.get("content-type", "")
    if not kind.startswith("application/json"):
        raise RefusedError(
            "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed",
            kind="Bad Request",
        )
    return bytes(raw)


def _json(value: object, status: HTTPStatus = HTTPStatus.OK) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(value), status=status.value, content_type="application/json"
    )


class Listener:
    """One address. Closing it breaks the connections that are open."""

    def __init__(self, server: SimulatedServer) -> None:
        # A client that leaves cancels its handler, and with it what the replica does for it.
        self._server = web.Server(server.handle, handler_cancellation=True)
        self._runner = web.ServerRunner(self._server, shutdown_timeout=0)

    async def start(self, host: str, port: int) -> None:
        """Raises OSError when the address is taken."""
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port, backlog=1024, reuse_address=True).start()

    async def stop(self) -> None:
        await self._runner.cleanup()

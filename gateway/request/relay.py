"""From the engine's answer to the client, piece by piece, as it arrives."""

from __future__ import annotations

import asyncio
import time
from contextlib import AbstractAsyncContextManager
from types import TracebackType

from engine_adapter.base import EngineLostError, EngineTimeoutError
from engine_adapter.engine_client import EngineResponse
from gateway.accounts.record import Outcome
from gateway.request.answer import read_answer, without_metrics
from gateway.request.call import Call
from gateway.request.stream_watch import StreamWatch
from gateway.web.errors import upstream_body
from gateway.web.exchange import EVENT_STREAM, Exchange
from gateway.web.http_headers import CACHED_TOKENS, PREDICTED_TOKENS, REPLICA, for_client

MAX_ANSWER_BYTES = 64 * 1024 * 1024
"""Bound of an answer that is not a stream."""

MAX_ERROR_BYTES = 1024 * 1024


class Silence:
    """A block that raises TimeoutError when nothing moved for `max_s`.

    `broken` is called for every piece of a stream, so it only notes the time; one timer looks at
    it when the silence could be over.
    """

    def __init__(self, max_s: float) -> None:
        self._max_s = max_s
        self._loop = asyncio.get_running_loop()
        self._moved = self._loop.time()
        self._timeout = asyncio.timeout(None)
        self._timer = self._loop.call_later(max_s, self._look)

    def broken(self) -> None:
        """Something moved."""
        self._moved = self._loop.time()

    def _look(self) -> None:
        end = self._moved + self._max_s
        if end > self._loop.time():
            self._timer = self._loop.call_at(end, self._look)
        else:
            self._timeout.reschedule(end)

    async def __aenter__(self) -> Silence:
        await self._timeout.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._timer.cancel()
        await self._timeout.__aexit__(kind, error, traceback)


async def relay(
    exchange: Exchange,
    call: Call,
    request: AbstractAsyncContextManager[EngineResponse],
    wants_usage: bool,
    max_silence_s: float,
) -> None:
    """Send `request` and pass its answer on; fills `call` on the way.

    Raises EngineUnreachableError, EngineTimeoutError (silent for `max_silence_s`), EngineLostError;
    ConnectionError when the client has gone or does not read for `max_silence_s`.
    """
    try:
        async with Silence(max_silence_s) as silence:
            call.sent = time.perf_counter()
            async with request as engine:
                silence.broken()
                if engine.status != 200:
                    await _pass_error(exchange, call, engine)
                elif engine.headers.get("Content-Type", "").startswith(EVENT_STREAM):
                    await _pass_stream(exchange, call, engine, wants_usage, silence)
                else:
                    await _pass_whole(exchange, call, engine, silence)
    except TimeoutError:
        if exchange.writing:
            exchange.abort()
            raise ConnectionResetError("the client does not read") from None
        raise EngineTimeoutError(f"the engine was silent for {max_silence_s:g} s") from None


async def _pass_error(exchange: Exchange, call: Call, engine: EngineResponse) -> None:
    body = upstream_body(engine.status, await engine.read(MAX_ERROR_BYTES))
    headers = for_client(engine.headers)
    headers["Content-Type"] = "application/json"
    headers[REPLICA] = _replica(call)
    if engine.status in (429, 503):
        headers.setdefault("Retry-After", "1")
    # Prompts that are too long and the like: only the engine could judge them.
    refused = 400 <= engine.status < 500
    call.ended(Outcome.REFUSED if refused else Outcome.ENGINE_ERROR, engine.status)
    await exchange.send(engine.status, body, headers=headers)


async def _pass_whole(
    exchange: Exchange, call: Call, engine: EngineResponse, silence: Silence
) -> None:
    body = await engine.read(MAX_ANSWER_BYTES)
    silence.broken()
    answer = read_answer(body)
    call.usage, call.metrics = answer.usage, answer.metrics
    call.finish_reason = answer.finish_reason
    headers = for_client(engine.headers)
    headers[REPLICA] = _replica(call)
    headers[PREDICTED_TOKENS] = str(call.predicted_tokens)
    cached = answer.usage.cached_tokens if answer.usage else None
    if cached is not None:
        headers[CACHED_TOKENS] = str(cached)
    await exchange.send(200, without_metrics(body), headers=headers)
    call.ended(Outcome.OK, 200)


async def _pass_stream(
    exchange: Exchange, call: Call, engine: EngineResponse, wants_usage: bool, silence: Silence
) -> None:
    headers = for_client(engine.headers)
    headers[REPLICA] = _replica(call)
    headers[PREDICTED_TOKENS] = str(call.predicted_tokens)
    await exchange.start(200, headers, at_once=not engine.begun)
    watch = StreamWatch(wants_usage=wants_usage)
    rest = b""
    try:
        while chunk := await engine.next_chunk():
            rest = watch.feed(chunk)
            if engine.complete:
                break
            if rest:
                await exchange.write(rest)
                rest = b""
            silence.broken()
    except EngineLostError:
        if not watch.done:
            raise
    finally:
        call.first_token = watch.first_token_at
        call.usage, call.metrics = watch.usage, watch.metrics
        call.finish_reason = watch.finish_reason
    if not watch.done:
        if rest:
            await exchange.write(rest)
        raise EngineLostError("the engine ended the stream without [DONE]")
    call.ended(Outcome.ENGINE_ERROR if watch.failed else Outcome.OK, 200)
    await exchange.end(rest + watch.finish())


def _replica(call: Call) -> str:
    assert call.choice is not None
    return call.choice.replica.id

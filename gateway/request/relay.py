"""From the engine's answer to the client, piece by piece, as it arrives."""

from __future__ import annotations

import asyncio
import time
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from types import TracebackType

from multidict import CIMultiDict

from engine_adapter.base import EngineLostError, EngineTimeoutError
from engine_adapter.engine_client import EngineResponse
from gateway.accounts.record import Outcome
from gateway.request.answer import read_answer, without_metrics
from gateway.request.attempt import Attempt, EngineBusyError, EngineFailedError
from gateway.request.call import Call
from gateway.request.stream_watch import StreamWatch
from gateway.web.errors import upstream_body
from gateway.web.exchange import EVENT_STREAM, Exchange
from gateway.web.http_headers import CACHED_TOKENS, PREDICTED_TOKENS, REPLICA, ROUTE, for_client

MAX_ANSWER_BYTES = 64 * 1024 * 1024
"""Bound of an answer that is not a stream."""

MAX_ERROR_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class RelayOptions:
    """How an answer is passed on."""

    wants_usage: bool
    """The client asked for the usage chunk of a stream."""
    max_silence_s: float
    may_retry: bool
    """Another replica can be asked where this one fails before the first piece."""


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
    attempt: Attempt,
    options: RelayOptions,
) -> None:
    """Send `request` and pass its answer on; fills `call` on the way. Nothing is sent to the client
    before the first piece of the engine's answer is here.

    Raises EngineUnreachableError, EngineTimeoutError (silent for `max_silence_s`), EngineLostError,
    ReplicaLostError; where another replica may be asked, EngineBusyError and EngineFailedError too;
    ConnectionError when the client has gone or does not read for `max_silence_s`.
    """
    max_silence_s = options.max_silence_s
    try:
        async with Silence(max_silence_s) as silence, attempt:
            call.sent = time.perf_counter()
            async with request as engine:
                silence.broken()
                if engine.status != 200:
                    await _pass_error(exchange, call, engine, attempt, options)
                elif engine.headers.get("Content-Type", "").startswith(EVENT_STREAM):
                    await _Stream(exchange, call, engine, attempt, silence, options).relay()
                else:
                    await _pass_whole(exchange, call, engine, attempt, silence)
    except TimeoutError:
        if exchange.writing:
            exchange.abort()
            raise ConnectionResetError("the client does not read") from None
        attempt.fell_silent()
        raise EngineTimeoutError(f"the engine was silent for {max_silence_s:g} s") from None


async def _pass_error(
    exchange: Exchange,
    call: Call,
    engine: EngineResponse,
    attempt: Attempt,
    options: RelayOptions,
) -> None:
    busy = engine.status in (429, 503)
    if options.may_retry and busy:
        raise EngineBusyError(f"the engine answered {engine.status}")
    if options.may_retry and engine.status >= 500:
        raise EngineFailedError(f"the engine answered {engine.status}")
    if engine.status >= 500 and not busy:
        attempt.failed(f"answers {engine.status}")
    body = upstream_body(engine.status, await engine.read(MAX_ERROR_BYTES))
    headers = _headers(call, engine)
    headers["Content-Type"] = "application/json"
    if busy:
        headers.setdefault("Retry-After", "1")
    # Prompts that are too long and the like: only the engine could judge them.
    refused = 400 <= engine.status < 500
    call.ended(Outcome.REFUSED if refused else Outcome.ENGINE_ERROR, engine.status)
    await exchange.send(engine.status, body, headers=headers)


async def _pass_whole(
    exchange: Exchange, call: Call, engine: EngineResponse, attempt: Attempt, silence: Silence
) -> None:
    body = await engine.read(MAX_ANSWER_BYTES)
    silence.broken()
    attempt.moved()
    attempt.first_token()
    answer = read_answer(body)
    call.usage, call.metrics = answer.usage, answer.metrics
    call.finish_reason = answer.finish_reason
    headers = _headers(call, engine)
    headers[PREDICTED_TOKENS] = str(call.predicted_tokens)
    cached = answer.usage.cached_tokens if answer.usage else None
    if cached is not None:
        headers[CACHED_TOKENS] = str(cached)
    await exchange.send(200, without_metrics(body), headers=headers)
    call.ended(Outcome.OK, 200)


@dataclass(slots=True)
class _Stream:
    """A stream on its way through."""

    exchange: Exchange
    call: Call
    engine: EngineResponse
    attempt: Attempt
    silence: Silence
    options: RelayOptions

    async def relay(self) -> None:
        call, watch = self.call, StreamWatch(wants_usage=self.options.wants_usage)
        try:
            rest = await self._pass(watch)
        finally:
            call.first_token = watch.first_token_at
            call.usage, call.metrics = watch.usage, watch.metrics
            call.finish_reason = watch.finish_reason
        if not watch.done:
            if rest:
                await self._write(rest)
            raise EngineLostError("the engine ended the stream without [DONE]")
        call.ended(Outcome.ENGINE_ERROR if watch.failed else Outcome.OK, 200)
        if not self.exchange.started:
            await self._start()
        await self.exchange.end(rest + watch.finish())

    async def _pass(self, watch: StreamWatch) -> bytes:
        """All but the last piece, which it returns."""
        rest = b""
        try:
            while chunk := await self.engine.next_chunk():
                self.silence.broken()
                self.attempt.moved()
                rest += watch.feed(chunk)
                if watch.first_token_at is not None:
                    self.attempt.first_token()
                elif watch.failed and self.options.may_retry and not self.exchange.started:
                    raise EngineFailedError("the engine failed before the first token")
                if self.engine.complete:
                    break
                if rest:
                    await self._write(rest)
                    rest = b""
        except EngineLostError:
            if not watch.done:
                raise
        return rest

    async def _write(self, piece: bytes) -> None:
        if not self.exchange.started:
            await self._start()
        await self.exchange.write(piece)
        self.silence.broken()

    async def _start(self) -> None:
        headers = _headers(self.call, self.engine)
        headers[PREDICTED_TOKENS] = str(self.call.predicted_tokens)
        await self.exchange.start(200, headers, at_once=False)


def _headers(call: Call, engine: EngineResponse) -> CIMultiDict[str]:
    headers = for_client(engine.headers)
    assert call.assignment is not None
    headers[REPLICA] = call.assignment.replica.id
    if call.explain:
        headers[ROUTE] = call.assignment.made.line().header()
    return headers

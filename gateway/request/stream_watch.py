"""Reads along in a stream and decides what of it the client gets. No I/O.

Most chunks pass untouched and unparsed: only the first ones (to know the first token from the role
chunk) and those that mention usage, an error or a reason to finish are looked into. Inside JSON
strings quotes are escaped, so the searches below find keys only.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from gateway.request.answer import Chunk, EngineMetrics, Usage, read_chunk, without_metrics
from gateway.request.sse import DONE, SseScanner, event_data

_DONE_EVENT = b"data: " + DONE
_WORTH_A_LOOK = (b'"usage"', b'"error"', DONE, b'"finish_reason":"', b'"finish_reason": "')


class StreamWatch:
    """One stream. `wants_usage`: the client asked for the usage chunk."""

    def __init__(
        self, *, wants_usage: bool, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._wants_usage = wants_usage
        self._clock = clock
        self._scanner = SseScanner()
        self.first_token_at: float | None = None
        """By the clock; None before the first token."""
        self.usage: Usage | None = None
        self.metrics: EngineMetrics | None = None
        self.finish_reason: str | None = None
        """The first that was seen."""
        self.done = False
        """The stream's proper end was seen."""
        self.failed = False
        """The engine reported an error in the stream."""

    def feed(self, chunk: bytes) -> bytes:
        """What the client gets for `chunk`; an event that is not complete is held back."""
        events = self._scanner.feed(chunk)
        if len(events) == 1:
            return self._pass(events[0])
        return b"".join(map(self._pass, events))

    def finish(self) -> bytes:
        """The rest, when the engine has ended the stream."""
        return self._scanner.flush()

    def _pass(self, event: bytes) -> bytes:
        if self.first_token_at is not None and not any(word in event for word in _WORTH_A_LOOK):
            return event
        data = event_data(event)
        if data == DONE:
            self.done = True
            return event
        chunk = read_chunk(data)
        if chunk is None:
            return event
        if chunk.error is not None:
            self.failed = True
        if self.first_token_at is None and any(choice.has_token for choice in chunk.choices):
            self.first_token_at = self._clock()
        for choice in chunk.choices:
            self.finish_reason = self.finish_reason or choice.finish_reason
        return self._pass_usage(event, data, chunk)

    def _pass_usage(self, event: bytes, data: bytes, chunk: Chunk) -> bytes:
        """Read usage and metrics; the last chunk, which has no choices, is for who asked."""
        if chunk.usage is None:
            return event
        self.usage = chunk.usage
        if chunk.metrics is not None:
            self.metrics = chunk.metrics
        if chunk.choices:
            return event
        if not self._wants_usage:
            return b""
        return event if chunk.metrics is None else b"data: " + without_metrics(data) + b"\n\n"

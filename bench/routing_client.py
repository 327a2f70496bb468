"""The clients of bench.routing: requests leave when their time has come, whoever still waits."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass

from bench.lean_client import LeanClient
from bench.routing_trace import Workload, sessions_of

_HEADER = re.compile(rb"\r\n(x-headstart-replica|x-headstart-route): ([^\r]*)", re.IGNORECASE)
_USAGE = re.compile(rb'"usage"\s*:\s*\{')


@dataclass(frozen=True, slots=True)
class Pace:
    """How the trace's time and simulated time pass, in seconds of each per second here."""

    trace: float
    simulated: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request. Times are simulated seconds, those of the run's start are 0; tokens are those
    on the wire."""

    index: int
    """In the slice."""
    sent_s: float
    late_s: float
    """Real seconds that the client sent it after it meant to."""
    ttft_s: float
    ended_s: float
    prompt_tokens: int
    cached_tokens: int
    replica: str
    route: str
    """The decision as the gateway explains it; empty where it was not asked to."""
    error: str
    """Why there is no complete answer; empty where there is one."""


class OpenLoop:
    """Sends a workload to one URL. Requests of one session wait for each other, no others do."""

    def __init__(
        self, workload: Workload, bodies: Sequence[bytes], url: str, pace: Pace, limit_s: float
    ) -> None:
        """`limit_s`: real seconds for all of it; what has no answer by then is lost."""
        self._workload = workload
        self._bodies = bodies
        self._url = url
        self._pace = pace
        self._limit_s = limit_s
        self._idle: list[LeanClient] = []
        self._outcomes: dict[int, Outcome] = {}
        self._start = 0.0

    async def run(self) -> list[Outcome]:
        """All requests in the order of the trace."""
        self._start = time.perf_counter()
        try:
            async with asyncio.timeout(self._limit_s), asyncio.TaskGroup() as tasks:
                for indices in sessions_of(self._workload):
                    tasks.create_task(self._session(indices))
        except TimeoutError:
            pass  # the missing ones are lost: below
        for client in self._idle:
            client.close()
        return [
            self._outcomes.get(index) or _lost(index, self._limit_s, "no answer in time")
            for index in range(len(self._workload.requests))
        ]

    async def _session(self, indices: Sequence[int]) -> None:
        free = 0.0
        for index in indices:
            request = self._workload.requests[index]
            due = max(request.at_s / self._pace.trace, free + request.think_s / self._pace.trace)
            # Without an earlier answer there is nothing to think about.
            due = due if free else request.at_s / self._pace.trace
            await asyncio.sleep(self._start + due - time.perf_counter())
            late_s = time.perf_counter() - self._start - due
            self._outcomes[index] = await self._ask(index, max(0.0, late_s))
            free = time.perf_counter() - self._start

    async def _ask(self, index: int, late_s: float) -> Outcome:
        sent = time.perf_counter()
        speed = self._pace.simulated
        client: LeanClient | None = None
        try:
            client = await self._client()
            timing = await client.ask(self._bodies[index])
        except (OSError, RuntimeError) as error:
            _close(client)
            return _lost(index, (sent - self._start) * speed, str(error))
        except asyncio.CancelledError:
            _close(client)
            raise
        answer = client.answer
        self._idle.append(client)
        headers = {name.lower(): value for name, value in _HEADER.findall(answer)}
        prompt, cached = usage_of(answer)
        return Outcome(
            index=index,
            sent_s=(sent - self._start) * speed,
            late_s=late_s,
            ttft_s=timing.ttft_s * speed,
            ended_s=(sent - self._start + timing.whole_s) * speed,
            prompt_tokens=prompt,
            cached_tokens=cached,
            replica=headers.get(b"x-headstart-replica", b"").decode(),
            route=headers.get(b"x-headstart-route", b"").decode(),
            error="" if prompt else "the stream ended without usage",
        )

    async def _client(self) -> LeanClient:
        while self._idle:
            client = self._idle.pop()
            if not client.closed:
                return client
        return await LeanClient.connect(self._url, first_token_event=1)


def usage_of(answer: bytes) -> tuple[int, int]:
    """Prompt tokens and reused ones; zeros where the stream broke before it said so."""
    found = list(_USAGE.finditer(answer))
    if not found:
        return 0, 0
    start = found[-1].end() - 1
    usage, _ = json.JSONDecoder().raw_decode(answer[start : start + 1000].decode())
    details = usage.get("prompt_tokens_details") or {}
    return usage["prompt_tokens"], details.get("cached_tokens") or 0


def _close(client: LeanClient | None) -> None:
    if client is not None:
        client.close()


def _lost(index: int, sent_s: float, error: str) -> Outcome:
    return Outcome(index, sent_s, 0.0, 0.0, sent_s, 0, 0, "", "", error[:500])

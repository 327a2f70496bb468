"""Calls whose answers are out, until they are recorded."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from gateway.accounts.record import Outcome, RequestRecord
from gateway.request.call import Call
from gateway.request.rendering_checks import RenderingChecks
from policies.access import Stop
from prefix_store.events import BlocksLoaded


class LoadReports(Protocol):
    """What the engines' connectors reported about loads of stored blocks."""

    def take(self, request_id: str) -> BlocksLoaded | None:
        """The report under a `Call.report_id`, once; None when there is none (yet)."""


class Recorder(Protocol):
    """The accounting."""

    def record(self, record: RequestRecord) -> None:
        """One finished request."""


class Log(Protocol):
    """The request log."""

    def add(self, call: Call, record: RequestRecord) -> None:
        """One finished request. Returns at once."""


class Sampler(Protocol):
    """Who finds out whether the index lacks something."""

    def noticed(self, engine_id: str, predicted_tokens: int, delivered_device_tokens: int) -> None:
        """What a replica's own cache was known to have of a prompt, and what it had."""


class Teller(Protocol):
    """Who tells the store."""

    def tell(self, report_id: str, stop: Stop, output_tokens: int) -> None:
        """How an answer ended. Returns at once."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    call: Call
    until: float


class EndedCalls:
    """Makes one record of each call: at once, or, where a load must have happened whose report is
    still on its way, a little later. No answer waits for it."""

    def __init__(
        self,
        loads: LoadReports,
        recorder: Recorder,
        checks: RenderingChecks | None = None,
        *,
        outcomes: Teller | None = None,
        log: Log | None = None,
        sampler: Sampler | None = None,
        wait_s: float = 0.05,
        max_waiting: int = 1024,
    ) -> None:
        """`max_waiting`: with more calls than this that wait, further ones do not."""
        self._loads = loads
        self._recorder = recorder
        self._checks = checks
        self._outcomes = outcomes
        self._log = log
        self._sampler = sampler
        self._wait_s = wait_s
        self._max_waiting = max_waiting
        self._waiting: deque[_Waiting] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        """Calls that wait for their reports."""
        return len(self._waiting)

    def add(self, call: Call) -> None:
        """The answer of `call` is out, however it ended."""
        call.finished = time.perf_counter()
        loaded = self._report(call)
        if loaded is None and call.lacks_report and len(self._waiting) < self._max_waiting:
            until = asyncio.get_running_loop().time() + self._wait_s
            self._waiting.append(_Waiting(call, until))
            self._set_timer()
        else:
            self._record(call, loaded)
        if self._outcomes is not None and call.report_id is not None and call.sent is not None:
            self._outcomes.tell(call.report_id, call.stop, call.output_tokens)
        if self._checks is not None:
            self._checks.consider(call)

    def close(self) -> None:
        """Record what still waits, now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._waiting:
            self._record_late(self._waiting.popleft().call)

    def _report(self, call: Call) -> BlocksLoaded | None:
        return None if call.report_id is None else self._loads.take(call.report_id)

    def _record_late(self, call: Call) -> None:
        self._record(call, self._report(call))

    def _record(self, call: Call, loaded: BlocksLoaded | None) -> None:
        if call.assignment is not None:
            call.assignment.ended(time.monotonic(), call.observed(loaded))
        record = call.record(loaded)
        self._recorder.record(record)
        self._notice(call, record)
        if self._log is not None:
            self._log.add(call, record)

    def _notice(self, call: Call, record: RequestRecord) -> None:
        prompt, replica = record.prompt, call.replica
        if self._sampler is None or replica is None or prompt is None:
            return
        if call.outcome is Outcome.OK and not prompt.unattributed:
            self._sampler.noticed(replica, call.device_tokens, prompt.delivered_device)

    def _set_timer(self) -> None:
        if self._waiting and self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(self._waiting[0].until, self._time_is_up)

    def _time_is_up(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        try:
            while self._waiting and self._waiting[0].until <= now:
                self._record_late(self._waiting.popleft().call)
        finally:
            self._set_timer()

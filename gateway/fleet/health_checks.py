"""Looks at one replica again and again: is it there, how busy is it, does it move."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from engine_adapter.base import EngineAdapterError, EngineRefusedError, EngineTimeoutError
from engine_adapter.engine_gauges import EngineGauges
from gateway.fleet.activity import Activity
from gateway.fleet.condition import Condition
from policies.fleet import HealthConfig

_JITTER = 0.2
"""Looks are early or late by up to this share of the interval: many gateways shall not ask many
replicas in step."""


class Probe(Protocol):
    """The questions; see engine_adapter.engine_probe."""

    async def health(self, timeout_s: float) -> int:
        """The status of /health. Raises EngineAdapterError."""

    async def gauges(self, timeout_s: float) -> EngineGauges | None:
        """How busy it is, where it says so."""

    async def compute(self, timeout_s: float) -> None:
        """Returns when it has computed a token. Raises EngineAdapterError."""


class Watcher(Protocol):
    """Who wants to know more than the condition."""

    def polled(self, gauges: EngineGauges) -> None:
        """What the engine itself says."""

    def restarted(self) -> None:
        """The engine is a new process: what its predecessor held is gone."""


@dataclass(frozen=True, slots=True)
class _Failure:
    """Of a look: a part of a sentence, and whether the connection was refused."""

    reason: str
    refused: bool = False


class HealthCheck:
    """The health check of one replica. Whoever owns the replica runs it as one task."""

    def __init__(
        self,
        probe: Probe,
        condition: Condition,
        activity: Activity,
        watcher: Watcher,
        config: HealthConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """`clock`: that of the condition and the activity. `jitter`: in [0, 1)."""
        self._probe = probe
        self._condition = condition
        self._activity = activity
        self._watcher = watcher
        self._config = config
        self._clock = clock
        self._jitter = jitter
        self._gauges: EngineGauges | None = None
        """The last ones."""

    async def run(self) -> None:
        """Look at once, and then about every `interval` seconds, until cancelled."""
        while True:
            await self.look()
            spread = 1.0 + _JITTER * (2.0 * self._jitter() - 1.0)
            await asyncio.sleep(self._config.interval * spread)

    async def look(self) -> None:
        """One look. Whatever the engine does, nothing is raised."""
        failure = await self._failure()
        if failure is None:
            await self._read_gauges()  # first: a restart is told before the replica is back
            self._condition.probe_ok()
        else:
            self._condition.probe_failed(failure.reason, refused=failure.refused)
        self._look_for_stall()

    async def _failure(self) -> _Failure | None:
        timeout_s = self._config.timeout
        try:
            status = await self._probe.health(timeout_s)
            if status == 200 and self._condition.must_compute:
                return await self._computes()
        except EngineRefusedError:
            return _Failure("nothing listens at its address", refused=True)
        except EngineTimeoutError:
            return _Failure(f"no answer to /health within {timeout_s:g} s")
        except EngineAdapterError as error:
            return _Failure(f"no answer to /health: {error}")
        return None if status == 200 else _Failure(f"/health answers {status}")

    async def _computes(self) -> _Failure | None:
        """A stalled replica computes a token before it is back, however long that takes: it is
        given the time after which it would be called stalled."""
        try:
            await self._probe.compute(self._config.stall)
        except EngineAdapterError as error:
            return _Failure(f"stalled, and does not compute: {error}")
        self._activity.moved_at = self._clock()
        return None

    async def _read_gauges(self) -> None:
        gauges, before = await self._probe.gauges(self._config.timeout), self._gauges
        if gauges is None:
            return
        self._gauges = gauges
        if before is not None and gauges.restarted_since(before):
            self._condition.restarted()
            self._watcher.restarted()
        elif before is not None and gauges.moved_since(before):
            # A long prompt, or an answer in one piece: not a byte comes, and yet it works.
            self._activity.moved_at = self._clock()
        self._watcher.polled(gauges)

    def _look_for_stall(self) -> None:
        silent_s = self._activity.silent_s(self._clock())
        if silent_s >= self._config.stall:
            self._condition.stalled(
                f"not a byte came for {silent_s:.0f} s, with {self._activity.in_flight} in flight"
            )

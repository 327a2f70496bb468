"""Which requests make their engine announce what it reuses, not only what it computes.

A gateway that joined late, or lost events that the engine no longer keeps, finds that an engine
reuses more than the index knew. One request in vLLM's full report mode teaches the prefix that it
reuses; but each costs the engine an event as long as its prompt, so they are few.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

MAX_ENGINES = 4096

Learned = Callable[[str], int | None]
"""Id of an engine -> blocks that such reports taught since the start; None: it cannot teach."""


@dataclass(slots=True)
class _Engine:
    interval_s: float
    is_lacking: bool = False
    """Since the last report it reused more than was known."""
    credit: float = 1.0
    """Reports that its requests have paid for."""
    last: float = float("-inf")
    """Time of the last report."""
    learned: int = 0
    """By all that came until now."""


class ReportSampler:
    """Asks for a report where one was found lacking: a share of the requests, with a pause between
    two, which doubles while they teach nothing. Pure but for its clock."""

    def __init__(
        self,
        learned: Learned,
        *,
        share: float = 0.125,
        min_interval_s: float = 0.25,
        max_interval_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._learned = learned
        self._share = share
        self._min_interval_s = min_interval_s
        self._max_interval_s = max_interval_s
        self._clock = clock
        self._engines: dict[str, _Engine] = {}

    def noticed(self, engine_id: str, predicted_tokens: int, delivered_device_tokens: int) -> None:
        """An answer has ended: of its prompt so much was known to lie in the engine's own memory,
        and so much the engine reused from there (without what a store loaded)."""
        if delivered_device_tokens > predicted_tokens:
            self._engine(engine_id).is_lacking = True

    def wants_full(self, engine_id: str) -> bool:
        """Whether the request that goes there now shall report; counts as asked if so."""
        engine = self._engines.get(engine_id)
        if engine is None:
            return False
        learned = self._learned(engine_id)
        if learned is None:
            del self._engines[engine_id]
            return False
        if learned > engine.learned:
            engine.learned, engine.interval_s = learned, self._min_interval_s
        engine.credit = min(1.0, engine.credit + self._share)
        now = self._clock()
        if not engine.is_lacking or engine.credit < 1.0 or now - engine.last < engine.interval_s:
            return False
        engine.interval_s = min(2 * engine.interval_s, self._max_interval_s)  # if it does not teach
        engine.last = now
        engine.credit -= 1.0
        engine.is_lacking = False
        return True

    def _engine(self, engine_id: str) -> _Engine:
        engine = self._engines.get(engine_id)
        if engine is None:
            if len(self._engines) >= MAX_ENGINES:
                self._engines.clear()
            engine = self._engines[engine_id] = _Engine(self._min_interval_s)
        return engine

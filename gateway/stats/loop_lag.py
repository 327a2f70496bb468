"""How late the event loop runs: what any request waits for, whatever it asks."""

from __future__ import annotations

import asyncio
from collections import deque

_INTERVAL_S = 0.25
_SAMPLES = 40


class LoopLag:
    """The worst delay of the last ten seconds. `run` is a task of its owner."""

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=_SAMPLES)

    @property
    def lag_s(self) -> float | None:
        """None before the first measurement."""
        return max(self._samples, default=None)

    async def run(self) -> None:
        """Measure until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _INTERVAL_S
            await asyncio.sleep(_INTERVAL_S)
            self._samples.append(max(0.0, loop.time() - due))

"""Tasks that run beside the requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from typing import Any

log = logging.getLogger(__name__)

Run = Callable[[], Coroutine[Any, Any, None]]

_RESTART_S = 1.0


class Background:
    """Owns its tasks: each has a name, is started again when it fails, and ends with `stop` or
    `close`."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def start(self, name: str, run: Run) -> None:
        """Run it from now on. A name stands for one task at a time."""
        assert name not in self._tasks, name
        self._tasks[name] = asyncio.create_task(_keep(name, run), name=name)

    async def stop(self, name: str) -> None:
        """End it, if it is there; returns when it has ended."""
        task = self._tasks.pop(name, None)
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def close(self) -> None:
        """End all of them."""
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def run_in_background(owned: AsyncExitStack, runs: Mapping[str, Run]) -> None:
    """Tasks that end with `owned`."""
    background = Background()
    owned.push_async_callback(background.close)
    for name, run in runs.items():
        background.start(name, run)


async def _keep(name: str, run: Run) -> None:
    """Losing an index costs speed, never an answer: so no such task takes the gateway down."""
    while True:
        try:
            await run()
        except Exception:
            log.exception("%s failed; starting it again", name)
        await asyncio.sleep(_RESTART_S)

"""Tasks that run beside the requests for as long as the gateway lives."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from typing import Any

log = logging.getLogger(__name__)

Run = Callable[[], Coroutine[Any, Any, None]]

_RESTART_S = 1.0


async def run_in_background(owned: AsyncExitStack, runs: Mapping[str, Run]) -> None:
    """Tasks that end with `owned`."""
    tasks = [asyncio.create_task(_keep(name, run), name=name) for name, run in runs.items()]

    async def end() -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    owned.push_async_callback(end)


async def _keep(name: str, run: Run) -> None:
    """Losing an index costs speed, never an answer: so no such task takes the gateway down."""
    while True:
        try:
            await run()
        except Exception:
            log.exception("%s failed; starting it again", name)
        await asyncio.sleep(_RESTART_S)

"""Starts a child again whenever it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from engine_adapter.base import EngineAdapterError
from gateway.local.children import Child, Children
from gateway.settings.user_error import UserError
from prefix_store.base import StoreError

FIRST_BACKOFF_S = 1.0
LONGEST_BACKOFF_S = 60.0
SETTLED_S = 300.0
"""A child that ran this long is restarted at once again."""

Start = Callable[[], Awaitable[Child]]
Notice = Callable[[str], None]
"""Where it is said what goes on."""


async def keep_running(
    children: Children,
    child: Child,
    start: Start,
    notice: Notice,
    first_backoff_s: float = FIRST_BACKOFF_S,
) -> None:
    """Never returns. Each time that the child does not last, or cannot be started, the next try
    comes later."""
    backoff_s = first_backoff_s
    loop = asyncio.get_running_loop()
    while True:
        started = loop.time()
        await child.wait()
        await children.stop(child)
        if loop.time() - started > SETTLED_S:
            backoff_s = first_backoff_s
        what, again = child.failure(child.ending), None
        while again is None:
            notice(f"{what}; starting it again in {backoff_s:.0f} s")
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, LONGEST_BACKOFF_S)
            try:
                again = await start()
            except (OSError, EngineAdapterError, StoreError, UserError) as error:
                # A full disk or too many processes now need not be so in a minute.
                what = f"{child.spec.name} could not be started: {error}"
        child = again

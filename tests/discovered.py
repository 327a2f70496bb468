"""Listens to a discovery in tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager

from waiting import until

from gateway.fleet.discovery import Discovery
from policies.engine import EngineConfig


class Listener:
    """All lists that came, in order."""

    def __init__(self, discovery: Discovery) -> None:
        self.discovery = discovery
        self.lists: list[Sequence[EngineConfig]] = []

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[Listener]:
        """In a task of its own, which ends with the block."""
        task = asyncio.create_task(self._listen())
        try:
            yield self
        finally:
            assert not task.done(), "a discovery never ends"
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def urls(self, count: int) -> set[str]:
        """Of the list with this number, from 1, once it is there."""
        await until(lambda: len(self.lists) >= count)
        return {engine.url for engine in self.lists[count - 1]}

    async def problem(self) -> str:
        """Once there is one."""
        await until(lambda: self.discovery.problem is not None)
        assert self.discovery.problem is not None
        return self.discovery.problem

    async def _listen(self) -> None:
        async with aclosing(self.discovery.lists()) as lists:
            async for engines in lists:
                self.lists.append(engines)


async def short_pause(_: float) -> None:
    """Instead of the pauses that discoveries make."""
    await asyncio.sleep(0.005)

"""What ends the waiting of requests at a replica that is lost."""

from __future__ import annotations

import asyncio
from types import TracebackType

from engine_adapter.base import EngineAdapterError


class ReplicaLostError(EngineAdapterError):
    """The replica was ejected, or taken away, before a byte of the answer had come."""


class Lifeline:
    """A block that raises ReplicaLostError when its replica is lost, until it is `released`: from
    the first byte on an answer is left to come to its own end."""

    def __init__(self, losses: Losses) -> None:
        self._losses = losses
        self._timeout = asyncio.timeout(None)
        self._reason: str | None = None

    def cut(self, reason: str) -> None:
        """The replica is lost."""
        self._reason = reason
        self._timeout.reschedule(asyncio.get_running_loop().time())
        self.release()

    def release(self) -> None:
        """From now on it holds nothing."""
        self._losses.forget(self)

    async def __aenter__(self) -> Lifeline:
        await self._timeout.__aenter__()
        self._losses.add(self)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()
        try:
            await self._timeout.__aexit__(kind, error, traceback)
        except TimeoutError:
            if self._reason is None:
                raise
            raise ReplicaLostError(self._reason) from None


class Losses:
    """The lifelines of one replica: one for each request that waits for a first byte."""

    def __init__(self) -> None:
        self._held: set[Lifeline] = set()

    def __len__(self) -> int:
        return len(self._held)

    def lifeline(self) -> Lifeline:
        """For one request, as an asynchronous context manager."""
        return Lifeline(self)

    def add(self, lifeline: Lifeline) -> None:
        self._held.add(lifeline)

    def forget(self, lifeline: Lifeline) -> None:
        self._held.discard(lifeline)

    def lose(self, reason: str) -> None:
        """The replica is lost: all who wait for a first byte go elsewhere."""
        for lifeline in list(self._held):
            lifeline.cut(reason)

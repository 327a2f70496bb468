"""One attempt to have a request answered by one replica."""

from __future__ import annotations

import asyncio
import time
from types import TracebackType

from engine_adapter.base import (
    EngineAdapterError,
    EngineLostError,
    EngineRefusedError,
    EngineUnreachableError,
)
from gateway.fleet.assignment import Asked, Assignment
from gateway.fleet.dispatch import Dispatcher
from gateway.fleet.loss import ReplicaLostError


class EngineBusyError(EngineAdapterError):
    """The engine refused the request since it has too many."""


class EngineFailedError(EngineAdapterError):
    """The engine answered that it failed."""


RETRIED = (EngineUnreachableError, ReplicaLostError, EngineBusyError)
"""The request did nothing there, or nobody will answer it: others may be asked."""

RETRIED_ONCE = (EngineLostError, EngineFailedError)
"""The request may be what broke the engine: one more is asked, not all of them."""


def is_retryable(error: EngineAdapterError, already: int) -> bool:
    """Whether another replica should be asked, while nothing was sent to the client. `already`:
    attempts that failed with RETRIED_ONCE before."""
    return isinstance(error, RETRIED) or (isinstance(error, RETRIED_ONCE) and already == 0)


class Attempt:
    """From sending the request to the end of its answer: tells the replica's condition, activity
    and estimate what is seen on the way. An asynchronous context manager, inside which the loss
    of the replica raises ReplicaLostError until the first byte is here."""

    def __init__(self, dispatcher: Dispatcher, asked: Asked, assignment: Assignment) -> None:
        self._dispatcher = dispatcher
        self._asked = asked
        self._assignment = assignment
        self._replica = assignment.replica
        self._lifeline = assignment.replica.losses.lifeline()
        self._computed = False
        self._telling: asyncio.Handle | None = None
        self._failure: str | None = None

    def failed(self, reason: str) -> None:
        """The replica's fault, although the answer may be passed on."""
        self._failure = reason

    def fell_silent(self) -> None:
        """Nothing came for too long."""
        self._replica.condition.request_failed("falls silent")

    def moved(self) -> None:
        """A piece of the answer is here."""
        self._replica.activity.moved_at = time.monotonic()
        self._lifeline.release()

    def first_token(self) -> None:
        """The prompt is computed. May be called for every piece from then on. Told to others right
        after what runs now, so that the piece with the token need not wait for it."""
        if not self._computed:
            self._computed = True
            self._telling = asyncio.get_running_loop().call_soon(self._tell)

    def _tell(self) -> None:
        self._telling = None
        self._dispatcher.first_token(self._asked, self._assignment)

    async def __aenter__(self) -> Attempt:
        self._replica.activity.began(time.monotonic())
        try:
            await self._lifeline.__aenter__()
        except BaseException:
            self._replica.activity.ended()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._replica.activity.ended()
        if self._telling is not None:
            self._telling.cancel()
            self._tell()
        self._judge(error)
        await self._lifeline.__aexit__(kind, error, traceback)

    def _judge(self, error: BaseException | None) -> None:
        condition = self._replica.condition
        if self._failure is not None:
            condition.request_failed(self._failure)
        elif error is None:
            condition.request_ok()
        elif isinstance(error, EngineBusyError):
            pass  # it lives
        elif isinstance(error, EngineRefusedError):
            condition.request_failed("refuses connections", refused=True)
        elif isinstance(error, EngineUnreachableError):
            condition.request_failed("cannot be reached")
        elif isinstance(error, EngineLostError | EngineFailedError):
            condition.request_failed(str(error))

"""What can be wrong with a simulated engine (engine_adapter.simulated): POST /simulate/fault.

{"kind": "none"}                    all is well again
{"kind": "hang"}                    connections are accepted, and then nothing happens
{"kind": "stall"}                   /health and /metrics answer, but nothing is computed
{"kind": "fail"}                    every request is answered with 500
{"kind": "slow", "factor": 4}       every step takes so many times as long
{"kind": "restart", "seconds": 2}   all connections break; after so many real seconds a new
                                    engine with an empty cache listens
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

from engine_adapter.simulated.replica import Replica
from engine_adapter.simulated.request import RefusedError

KINDS = ("none", "hang", "stall", "fail", "slow", "restart")


class Faults:
    """Of one incarnation of an engine."""

    def __init__(self, replica: Replica, restart: Callable[[float], None]) -> None:
        """`restart` gets the seconds that the engine will be away."""
        self._replica = replica
        self._restart = restart
        self._answers = asyncio.Event()
        self._answers.set()
        self._fails = False

    async def meet(self) -> None:
        """Called at the start of every request. Raises RefusedError."""
        await self._answers.wait()
        if self._fails:
            raise RefusedError(
                "a simulated failure",
                kind="InternalServerError",
                status=HTTPStatus.INTERNAL_SERVER_ERROR,
            )

    def set(self, body: Mapping[str, Any]) -> None:
        """From now on. Raises RefusedError for what is not known."""
        kind = body.get("kind")
        if kind not in KINDS:
            raise RefusedError(f"kind must be one of {', '.join(KINDS)}")
        if kind == "restart":
            self._restart(_number(body, "seconds", 0.0))
            return
        self._fails = kind == "fail"
        self._replica.scheduler.slow_down(_number(body, "factor", 2.0) if kind == "slow" else 1.0)
        if kind == "hang":
            self._answers.clear()
        else:
            self._answers.set()
        if kind in ("hang", "stall"):
            self._replica.halt()
        else:
            self._replica.resume()


def _number(body: Mapping[str, Any], field: str, default: float) -> float:
    value = body.get(field, default)
    if not isinstance(value, int | float) or value < 0:
        raise RefusedError(f"{field} must be a number that is not negative")
    return float(value)

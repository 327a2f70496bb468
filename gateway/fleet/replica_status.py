"""What people are told of one replica."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:  # the command line reads these without an HTTP client
    from gateway.fleet.replica import Replica


class ReplicaStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of GET /admin/replicas."""

    id: str
    url: str
    model: str
    state: str
    """starting, ready, ejected or draining."""
    reason: str
    """One sentence."""
    since: float
    """Unix time at which it came into this state."""
    share: float
    """Of the requests that it could take: less than 1 during a slow start."""
    in_flight: int
    """Requests of this gateway that are with its engine."""
    waiting: int
    """Requests that wait here for a place at it."""
    engine_running: int
    """As its engine counts them, those of others too."""
    engine_waiting: int
    kv_free: float | None
    """Free share of its KV memory, 0 to 1; None where it does not say."""
    ejections: int
    """Since this gateway knows it."""

    @classmethod
    def of(cls, replica: Replica, *, model: str, now: float) -> ReplicaStatus:
        """`model`: that it serves. `now`: of the clock of its condition."""
        condition, estimate = replica.condition, replica.estimate
        return cls(
            id=replica.id,
            url=replica.config.url,
            model=model,
            state=condition.state.value,
            reason=condition.reason,
            since=round(time.time() - (now - condition.since), 3),
            share=round(condition.share(now), 3),
            in_flight=replica.places.running,
            waiting=replica.places.waiting,
            engine_running=estimate.running,
            engine_waiting=estimate.waiting,
            kv_free=estimate.kv_free,
            ejections=condition.ejections,
        )

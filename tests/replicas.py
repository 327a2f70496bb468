"""Replicas and assignments as the fleet makes them, without anybody who watches them."""

from __future__ import annotations

import time
from typing import cast

from engine_adapter.engine_client import EngineClient
from gateway.fleet.assignment import Assignment
from gateway.fleet.condition import Condition
from gateway.fleet.decisions import Made
from gateway.fleet.places import Places
from gateway.fleet.replica import Replica
from policies.engine import EngineConfig
from policies.fleet import HealthConfig
from policies.routing.base import Candidate, Decision, Evidence, Score
from policies.routing.replica_estimate import FleetPrior, ReplicaEstimate
from prefix_store.residency import Holder, Match, Medium


def replica_of(
    engine: EngineConfig,
    client: EngineClient | None = None,
    holders: tuple[Holder, ...] | None = None,
    *,
    max_wait_s: float = 30.0,
) -> Replica:
    """`holders`: its own memory alone, unless others are named."""
    return Replica(
        config=engine,
        client=cast("EngineClient", client),
        holders=holders or (Holder(engine.id, Medium.DEVICE),),
        condition=Condition(HealthConfig(), time.monotonic, others_settled=lambda: False),
        places=Places(engine.max_running, engine.max_waiting, max_wait_s),
        estimate=ReplicaEstimate(FleetPrior()),
    )


def candidate(replica: str = "engine-0", **fields: object) -> Candidate:
    """Idle, with nothing of the prompt, unless `fields` say otherwise."""
    values: dict[str, object] = {
        "running": 0,
        "waiting": 0,
        "capacity": 8,
        "device_tokens": 0,
        "stored_tokens": 0,
        "queue_s": 0.0,
        "load_s": 0.0,
        "prefill_s": 0.1,
        "kv_free": None,
        "evidence": Evidence.EXACT,
    }
    return Candidate(replica=replica, **{**values, **fields})  # type: ignore[arg-type]


def assignment_of(
    replica: Replica,
    match: Match | None = None,
    *,
    captured_blocks: int = 0,
    device_blocks: int = 0,
) -> Assignment:
    """The only candidate got the request."""
    decision = Decision("least_ttft", (Score(candidate(replica.id), 0.1),), "test")
    made = Made(decision, replica.id, "r", 100, attempt=1, waited_s=0.0)
    return Assignment(
        "key",
        replica,
        made,
        match,
        device_blocks=device_blocks,
        captured_blocks=captured_blocks,
    )

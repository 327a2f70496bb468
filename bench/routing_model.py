"""bench.routing without a gateway and without waiting: the same requests, policies, estimates and
simulated schedulers in one process, in virtual time.

What is missing is what the gateway adds: HTTP, events that take their time, requests that wait for
a prefix which another one computes. The router knows at every moment what every cache holds. So a
table takes minutes on a busy machine, says the same each time, and shows what a policy is worth.

What engines report and clients see can be made late (`--late`): steps that end late and HTTP add
the same few milliseconds to short prompts and long ones, and estimates must not be misled by it.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from pydantic import TypeAdapter

from bench.routing_client import Outcome, Pace
from bench.routing_fleet import HEALTH_INTERVAL_S, NUM_REPLICAS, FleetPlan
from bench.routing_trace import (
    TOKENS_PER_WIRE_TOKEN,
    WIRE_BLOCK_TOKENS,
    WireRequest,
    Workload,
    sessions_of,
)
from engine_adapter.simulated.events import EventLog
from engine_adapter.simulated.scheduler import Scheduler, SchedulerLimits
from engine_adapter.simulated.sequence import Job
from engine_adapter.simulated.sequence import Sequence as Running
from engine_adapter.simulated.timing import StepTiming
from policies.engine import EngineConfig
from policies.routing import Routing
from policies.routing.base import Candidate, Evidence, RouteRequest
from policies.routing.replica_estimate import (
    EngineLoad,
    FleetPrior,
    Observed,
    ReplicaEstimate,
    Work,
)
from prefix_store.base import BlockHash
from prefix_store.hashing import as_token_ids

CHUNK_S = 1.0
"""Simulated seconds of decoding that are computed at a time where nothing else happens."""
_CAPACITY = EngineConfig().max_running


@dataclass(slots=True)
class _Replica:
    """A scheduler, and what a gateway would believe of it."""

    name: str
    scheduler: Scheduler
    estimate: ReplicaEstimate


class ModelFleet:
    """One run. Its clock shows simulated seconds; estimates see those of the accelerated run."""

    def __init__(
        self, workload: Workload, plan: FleetPlan, pace: Pace, late_s: float = 0.0
    ) -> None:
        """`late_s`: mean of what a step's end and an answer's way add to what is observed, each,
        in real seconds."""
        limits = SchedulerLimits(
            num_blocks=plan.blocks_per_replica,
            block_size=WIRE_BLOCK_TOKENS,
            tokens_per_wire_token=TOKENS_PER_WIRE_TOKEN,
            chunk_s=CHUNK_S,
        )
        policy: TypeAdapter[Routing] = TypeAdapter(Routing)
        self._router = policy.validate_python(plan.routing).router()
        prior = FleetPrior()
        self._replicas = {
            name: _Replica(
                name,
                Scheduler(limits, StepTiming(), EventLog(WIRE_BLOCK_TOKENS, enabled=False)),
                ReplicaEstimate(prior),
            )
            for name in (f"engine-{i}" for i in range(NUM_REPLICAS))
        }
        self._workload = workload
        self._kv_tokens = plan.blocks_per_replica * WIRE_BLOCK_TOKENS
        self._speed = pace.simulated
        self._scale = pace.simulated / pace.trace
        """Simulated seconds for a second of the trace."""
        self._order = itertools.count()
        self._arrivals: list[tuple[float, int, Sequence[int]]] = []
        """(time, order, turns of a session that are left): a heap."""
        self._polled_at = 0.0
        self._late_s = late_s
        self._random = random.Random(0)
        self._outcomes: dict[int, Outcome] = {}

    def run(self) -> list[Outcome]:
        """All requests in the order of the trace."""
        for indices in sessions_of(self._workload):
            self._arrive(self._workload.requests[indices[0]].at_s * self._scale, indices)
        while True:
            due = [(at, each) for each in self._replicas.values()
                   if (at := each.scheduler.due_at) is not None]  # fmt: skip
            step_at, replica = min(due, key=lambda pair: pair[0], default=(float("inf"), None))
            if replica is not None and (not self._arrivals or step_at <= self._arrivals[0][0]):
                replica.scheduler.advance(step_at)
            elif self._arrivals:
                now, _, indices = heapq.heappop(self._arrivals)
                self._poll(now)
                self._send(now, indices)
            else:
                return [self._outcomes[i] for i in range(len(self._workload.requests))]

    def busy_s(self) -> dict[str, float]:
        """Of each replica."""
        return {
            name: each.scheduler.counters.busy_s for name, each in self._replicas.items()
        }  # fmt: skip

    def _arrive(self, at_s: float, indices: Sequence[int]) -> None:
        heapq.heappush(self._arrivals, (at_s, next(self._order), indices))

    def _poll(self, now: float) -> None:
        """What health checks read."""
        if now < self._polled_at + HEALTH_INTERVAL_S * self._speed:
            return
        self._polled_at = now
        for each in self._replicas.values():
            scheduler = each.scheduler
            load = EngineLoad(
                scheduler.num_running,
                scheduler.num_waiting,
                1.0 - scheduler.kv_usage,
                self._kv_tokens,
            )
            each.estimate.polled(load, now / self._speed)

    def _send(self, now: float, indices: Sequence[int]) -> None:
        index = indices[0]
        request = self._workload.requests[index]
        job = Job(
            as_token_ids(request.token_ids),
            np.full(request.output_tokens, index, dtype="<i4"),
            streams=True,
        )
        hashes = hashes_of(job)
        candidates = [
            self._candidate(each, job.prompt.size, hashes, now) for each in self._replicas.values()
        ]
        asked = RouteRequest(
            num_tokens=job.prompt.size,
            session=request.session,
            prefix=hashes[0] if hashes else b"",
        )
        best = self._router.decide(asked, candidates).best
        replica = self._replicas[best.replica]
        work = _work(job.prompt.size, best.device_tokens)
        replica.estimate.sent(str(index), work, now / self._speed)
        sequence = replica.scheduler.add(job, now)
        sequence.progressed = lambda each, at: self._progressed(each, at, replica, indices)

    def _candidate(
        self, replica: _Replica, num_tokens: int, hashes: list[BlockHash], now: float
    ) -> Candidate:
        replica.scheduler.advance(now)
        device = replica.scheduler.find(hashes) * WIRE_BLOCK_TOKENS
        estimate = replica.estimate
        expected = estimate.expect(_work(num_tokens, device), now / self._speed)
        return Candidate(
            replica=replica.name,
            running=estimate.running,
            waiting=estimate.waiting,
            capacity=_CAPACITY,
            device_tokens=device,
            stored_tokens=0,
            queue_s=expected.queue_s,
            load_s=0.0,
            prefill_s=expected.prefill_s,
            kv_free=estimate.kv_free,
            evidence=Evidence.EXACT,
        )

    def _progressed(
        self, sequence: Running, now: float, replica: _Replica, indices: Sequence[int]
    ) -> None:
        index, *rest = indices
        replica.estimate.first_token(str(index), now / self._speed)
        if not sequence.is_finished:
            return
        outcome = _outcome(index, sequence, replica.name)
        self._outcomes[index] = outcome
        observed = self._later(_observed(sequence, self._speed))
        replica.estimate.ended(str(index), now / self._speed, observed)
        if rest:
            following: WireRequest = self._workload.requests[rest[0]]
            at_s = max(following.at_s * self._scale, now + following.think_s * self._scale)
            self._arrive(at_s, rest)

    def _later(self, observed: Observed) -> Observed:
        if not self._late_s:
            return observed
        assert observed.prefill_s is not None
        assert observed.ttft_s is not None
        step_s, way_s = (self._random.expovariate(1 / self._late_s) for _ in range(2))
        return replace(
            observed,
            prefill_s=observed.prefill_s + step_s,
            ttft_s=observed.ttft_s + step_s + way_s,
        )


def hashes_of(job: Job) -> list[BlockHash]:
    """Of the blocks that it could reuse, as the schedulers name them."""
    sequence = Running.of(job, arrived_at=0.0, number=0, scale=1, block_size=WIRE_BLOCK_TOKENS)
    return sequence.hashes[: (job.prompt.size - 1) // WIRE_BLOCK_TOKENS]


def _work(num_tokens: int, reused: int) -> Work:
    return Work(max(1, num_tokens - reused), 0, reused)


def _observed(sequence: Running, speed: float) -> Observed:
    """As the engine reports it, in real seconds."""
    scheduled, first = sequence.scheduled_at, sequence.first_token_at
    assert scheduled is not None
    assert first is not None
    return Observed(
        _work(sequence.job.prompt.size, sequence.cached_tokens or 0),
        queue_s=(scheduled - sequence.arrived_at) / speed,
        load_s=0.0,
        prefill_s=(first - scheduled) / speed,
        ttft_s=(first - sequence.arrived_at) / speed,
    )


def _outcome(index: int, sequence: Running, replica: str) -> Outcome:
    first, ended = sequence.first_token_at, sequence.finished_at
    assert first is not None
    assert ended is not None
    return Outcome(
        index=index,
        sent_s=sequence.arrived_at,
        late_s=0.0,
        ttft_s=first - sequence.arrived_at,
        ended_s=ended,
        prompt_tokens=sequence.job.prompt.size,
        cached_tokens=sequence.cached_tokens or 0,
        replica=replica,
        route="",
        error="",
    )

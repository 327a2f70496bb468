"""What a run of bench.routing says: figures of one policy on one trace at one load."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.routing_client import Outcome

BUSIEST = 0.95
"""Share of one core above which a process on one thread was the bottleneck."""
LATEST_S = 0.05
"""Real seconds; what is later than this is seen in the figures."""


@dataclass(frozen=True, slots=True)
class Ttft:
    """Times to first token in simulated seconds, from the client's sending on."""

    mean_s: float
    p50_s: float
    p90_s: float
    p99_s: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Ttft:
        """NaN where there are none."""
        if not values:
            nan = float("nan")
            return cls(nan, nan, nan, nan)
        ordered = sorted(values)

        def rank(share: float) -> float:
            return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]

        return cls(statistics.fmean(ordered), rank(0.5), rank(0.9), rank(0.99))


@dataclass(frozen=True, slots=True)
class Harness:
    """How busy the machine was, in real time: where it could not follow, the run says nothing."""

    gateway_cpu: float
    """Cores."""
    engines_cpu: float
    client_cpu: float
    loop_lag_s: float | None
    """Worst delay of the gateway's event loop."""
    client_late_p99_s: float
    """By which requests were sent late."""
    engines_late_p99_s: float | None
    """By which simulated steps ended late; None where the engines do not say."""

    @property
    def faults(self) -> list[str]:
        """Why the run is not valid; empty when it is."""
        shares = {"gateway": self.gateway_cpu, "engines": self.engines_cpu,
                  "client": self.client_cpu}  # fmt: skip
        lates = {"gateway's loop": self.loop_lag_s, "client": self.client_late_p99_s,
                 "engines": self.engines_late_p99_s}  # fmt: skip
        found = [f"{name} used {cpu:.2f} cores" for name, cpu in shares.items() if cpu > BUSIEST]
        found += [
            f"{name} late by {late * 1e3:.0f} ms"
            for name, late in lates.items()
            if late is not None and late > LATEST_S
        ]
        return found


@dataclass(frozen=True, slots=True)
class Asked:
    """What was to be run."""

    trace: str
    load: float
    """Of the capacity that the fleet would have with one big cache."""
    policy: str
    speed: float
    """Simulated seconds a second."""


@dataclass(frozen=True, slots=True)
class Run:
    """One policy, one trace, one load. `late_...`: of the second half of the requests, when caches
    and estimates are warm."""

    trace: str
    load: float
    policy: str
    speed: float
    requests: int
    lost: int
    losses: Mapping[str, int]
    """By reason."""
    hit_rate: float
    late_hit_rate: float
    ttft: Ttft
    late_ttft: Ttft
    computed_imbalance: float
    """Prompt tokens computed: those of the replica with the most, of the mean."""
    busy_imbalance: float | None
    """Busy time, likewise; None where the engines do not say."""
    took_s: float
    """Simulated seconds from the first request to the last answer."""
    harness: Harness | None
    """None in virtual time."""

    @property
    def faults(self) -> list[str]:
        """Why it is not valid; empty when it is."""
        return self.harness.faults if self.harness is not None else []


@dataclass(frozen=True, slots=True)
class Reading:
    """What was read of the processes around a run."""

    busy_s: Mapping[str, float]
    """Simulated seconds that each engine was busy; empty where they do not say."""
    harness: Harness | None


def run_of(asked: Asked, outcomes: Sequence[Outcome], replicas: int, reading: Reading) -> Run:
    """The figures of one run; outcomes are in the order of the trace."""
    late = outcomes[len(outcomes) // 2 :]
    losses = Counter(
        outcome.error.partition("\n")[0][:120] for outcome in outcomes if outcome.error
    )
    busy = list(reading.busy_s.values())
    return Run(
        trace=asked.trace,
        load=asked.load,
        policy=asked.policy,
        speed=asked.speed,
        requests=len(outcomes),
        lost=losses.total(),
        losses=dict(losses),
        hit_rate=hit_rate(outcomes),
        late_hit_rate=hit_rate(late),
        ttft=ttft_of(outcomes),
        late_ttft=ttft_of(late),
        computed_imbalance=imbalance(computed_tokens(outcomes, replicas)),
        busy_imbalance=imbalance(busy) if busy else None,
        took_s=max((outcome.ended_s for outcome in outcomes), default=0.0),
        harness=reading.harness,
    )


def hit_rate(outcomes: Sequence[Outcome]) -> float:
    """Tokens reused, as the engines report, of all prompt tokens of complete answers."""
    total = sum(outcome.prompt_tokens for outcome in outcomes)
    return sum(outcome.cached_tokens for outcome in outcomes) / total if total else 0.0


def ttft_of(outcomes: Sequence[Outcome]) -> Ttft:
    return Ttft.of([outcome.ttft_s for outcome in outcomes if not outcome.error])


def computed_tokens(outcomes: Sequence[Outcome], replicas: int) -> list[int]:
    """Prompt tokens that each replica computed; zeros for those that got no request."""
    by_replica: dict[str, int] = defaultdict(int)
    for outcome in outcomes:
        if not outcome.error:
            by_replica[outcome.replica] += outcome.prompt_tokens - outcome.cached_tokens
    counts = list(by_replica.values())
    return counts + [0] * (replicas - len(counts))


def imbalance(values: Sequence[float]) -> float:
    """Maximum over mean: 1 is even."""
    mean = statistics.fmean(values)
    return max(values) / mean if mean else 1.0

"""Figures of routing runs, and what is made of them."""

from __future__ import annotations

import math
from dataclasses import replace

from bench.routing_client import Outcome, usage_of
from bench.routing_reference import Reference
from bench.routing_result import Asked, Harness, Reading, Run, Ttft, imbalance, run_of
from bench.routing_table import machine_lines, markdown, verdicts

QUIET = Harness(
    gateway_cpu=0.3,
    engines_cpu=0.4,
    client_cpu=0.1,
    loop_lag_s=0.004,
    client_late_p99_s=0.002,
    engines_late_p99_s=0.003,
)
AGENTS = "agent_sessions_a"


def outcome(index: int, ttft_s: float = 1.0, cached: int = 0, error: str = "") -> Outcome:
    return Outcome(
        index=index,
        sent_s=float(index),
        late_s=0.0,
        ttft_s=ttft_s,
        ended_s=index + ttft_s,
        prompt_tokens=0 if error else 100,
        cached_tokens=cached,
        replica="" if error else f"engine-{index % 2}",
        route="",
        error=error,
    )


def run(policy: str, outcomes: list[Outcome], trace: str = AGENTS) -> Run:
    return run_of(Asked(trace, 0.65, policy, 20.0), outcomes, 2, Reading({}, QUIET))


def of_ttft(policy: str, ttft_s: float, cached: int = 90) -> Run:
    return run(policy, [outcome(i, ttft_s, cached) for i in range(4)])


def test_the_first_half_warms_up() -> None:
    """It counts in the figures of all requests alone."""
    result = run("least_ttft", [outcome(0, 9.0, 0), outcome(1, 9.0, 0), outcome(2, 1.0, 50),
                                outcome(3, 3.0, 100)])  # fmt: skip
    assert result.late_hit_rate == 0.75
    assert result.hit_rate == 0.375
    assert result.late_ttft == Ttft(2.0, 1.0, 3.0, 3.0)
    assert result.took_s == 11.0 - 1.0


def test_lost_requests_are_counted_by_reason_and_in_no_mean() -> None:
    """A time to first token of nothing is not a short one."""
    result = run("least_ttft", [outcome(0), outcome(1), outcome(2, 2.0), outcome(3, error="gone")])
    assert (result.lost, dict(result.losses)) == (1, {"gone": 1})
    assert result.late_ttft.mean_s == 2.0
    lines = machine_lines([result])
    assert any(line.startswith("LOST") for line in lines)


def test_a_run_without_any_answer_has_no_times() -> None:
    """And does not fail."""
    result = run("least_ttft", [outcome(0, error="gone"), outcome(1, error="gone")])
    assert math.isnan(result.late_ttft.mean_s)
    assert result.hit_rate == 0.0


def test_a_replica_without_requests_counts_in_the_imbalance() -> None:
    """All on one of two is twice the mean."""
    assert imbalance([100.0, 0.0]) == 2.0
    assert imbalance([0.0, 0.0]) == 1.0


def test_a_busy_machine_makes_a_run_invalid() -> None:
    """With the reason."""
    late = replace(QUIET, loop_lag_s=0.4)
    result = replace(of_ttft("least_ttft", 1.0), harness=late)
    assert late.faults == ["gateway's loop late by 400 ms"]
    assert "| NO |" in markdown([result], {AGENTS: Reference(0.9, 0.9, 1.0)})
    assert not QUIET.faults


def test_aims_are_met_or_missed() -> None:
    """Against the best other policy, and against one big cache."""
    runs = [of_ttft("round_robin", 3.0), of_ttft("least_loaded", 1.5), of_ttft("least_ttft", 1.0)]
    met = verdicts(runs, {AGENTS: Reference(0.9, 0.92, 1.0)})
    assert [line.rpartition(" ")[2] for line in met] == ["met"] * 4
    runs[-1] = of_ttft("least_ttft", 1.6)
    missed = verdicts(runs, {AGENTS: Reference(0.9, 0.95, 1.0)})
    assert [line.rpartition(" ")[2] for line in missed] == ["MISSED"] * 4


def test_usage_is_that_of_the_last_event() -> None:
    """Streams without it are incomplete."""
    event = b'data: {"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":4}}}\n\n'
    assert usage_of(b'data: {"usage": null}\n\n' + event + b"data: [DONE]\n\n") == (9, 4)
    assert usage_of(b"data: [DONE]\n\n") == (0, 0)
    assert usage_of(event.replace(b'{"cached_tokens":4}', b"null")) == (9, 0)

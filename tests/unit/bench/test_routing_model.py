"""The fleet in virtual time."""

from __future__ import annotations

from collections import Counter

from bench.routing_client import Outcome, Pace
from bench.routing_fleet import NUM_REPLICAS, FleetPlan
from bench.routing_model import ModelFleet
from bench.routing_trace import WireRequest, Workload

PACE = Pace(trace=10.0, simulated=10.0)
BLOCK = 16


def turn(at_s: float, session: int, blocks: int, think_s: float = 0.0) -> WireRequest:
    """Turns of a session extend one another."""
    token_ids = tuple(1000 * session + i for i in range(BLOCK * blocks + 1))
    return WireRequest(at_s, think_s, f"s{session}", token_ids, output_tokens=2)


def run(policy: str, *requests: WireRequest) -> list[Outcome]:
    plan = FleetPlan({"kind": policy}, PACE.simulated, blocks_per_replica=100, max_model_len=2000)
    return ModelFleet(Workload("small", requests, 1000), plan, PACE).run()


def test_a_later_turn_is_sent_when_the_earlier_one_is_answered_and_thought_about() -> None:
    """Even when the trace has it earlier; and it reuses what the earlier one left."""
    first, second = run("prefix_affinity", turn(0.0, 1, 4), turn(0.1, 1, 8, think_s=2.0))
    assert second.sent_s == first.ended_s + 2.0
    assert (first.cached_tokens, second.cached_tokens) == (0, 4 * BLOCK)
    assert second.replica == first.replica


def test_a_later_turn_waits_for_its_time() -> None:
    """Of the trace."""
    _, second = run("prefix_affinity", turn(0.0, 1, 4), turn(1000.0, 1, 8))
    assert second.sent_s == 1000.0


def test_policies_decide() -> None:
    """Round robin spreads evenly what prefix affinity keeps together."""
    requests = [turn(100.0 * i, 1, 4) for i in range(NUM_REPLICAS)]
    assert set(Counter(each.replica for each in run("round_robin", *requests)).values()) == {1}
    assert len({each.replica for each in run("prefix_affinity", *requests)}) == 1


def test_equal_runs_are_equal() -> None:
    """Nothing depends on the machine."""
    requests = [turn(0.3 * i, i % 7, 4 + i // 7) for i in range(60)]
    assert run("least_ttft", *requests) == run("least_ttft", *requests)

"""One big cache, in the simulated engine's own cache."""

from __future__ import annotations

from bench.routing_reference import engine_seconds, one_big_cache
from bench.routing_trace import WireRequest, Workload
from engine_adapter.simulated.timing import StepTiming


def request(first: int, blocks: int) -> WireRequest:
    """Prompts with equal `first` extend one another."""
    token_ids = tuple(first * 1000 + i for i in range(16 * blocks + 1))
    return WireRequest(0.0, 0.0, "", token_ids, output_tokens=1)


def workload(*requests: WireRequest) -> Workload:
    return Workload("small", requests, distinct_tokens=1000)


def test_what_was_asked_before_is_reused_while_there_is_room() -> None:
    """The whole prompt but for its last token."""
    twice = workload(request(1, 4), request(1, 4))
    assert one_big_cache(twice, 100, StepTiming()).late_hit_rate == 64 / 65
    crowded = workload(request(1, 4), request(2, 4), request(1, 4), request(2, 4))
    assert one_big_cache(crowded, 6, StepTiming()).late_hit_rate < 64 / 65
    assert one_big_cache(crowded, 100, StepTiming()).late_hit_rate == 64 / 65


def test_reuse_saves_engine_time() -> None:
    """Never all of it: the answer has to be generated."""
    timing, asked = StepTiming(), request(1, 100)
    cold, warm = engine_seconds(asked, 0, timing), engine_seconds(asked, 1600, timing)
    assert 0.0 < warm < cold / 2

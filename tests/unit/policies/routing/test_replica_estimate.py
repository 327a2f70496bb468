"""What is expected of one replica."""

from __future__ import annotations

import random

import pytest

from policies.routing.engine_load import EngineLoad
from policies.routing.prefill_model import DEFAULT_TOKEN_S
from policies.routing.replica_estimate import (
    GAUGES_EXPIRY_S,
    MAX_REQUESTS,
    PENDING_EXPIRY_S,
    RUNNING_EXPIRY_S,
    Expected,
    FleetPrior,
    Observed,
    ReplicaEstimate,
    Work,
)

TOKEN_S = 5e-4
"""Of the imitated engine."""

IDLE = EngineLoad(0, 0)


def work(uncached: int, context: int = 0, stored: int = 0) -> Work:
    return Work(uncached, stored, context)


def observed(done: Work, **kwargs: float | None) -> Observed:
    seconds = TOKEN_S * done.uncached_tokens
    total = seconds + (kwargs.get("load_s") or 0.0)
    given = {"queue_s": 0.0, "load_s": 0.0, "prefill_s": seconds, "ttft_s": total} | kwargs
    return Observed(done, **given)  # type: ignore[arg-type]


def serve(estimate: ReplicaEstimate, done: Work, now: float = 0.0, **kwargs: float | None) -> None:
    """One request alone, from its sending to its end."""
    estimate.sent("served", done, now)
    estimate.first_token("served", now)
    estimate.ended("served", now, observed(done, **kwargs))


def learned(prior: FleetPrior | None = None, times: int = 20) -> ReplicaEstimate:
    estimate = ReplicaEstimate(prior or FleetPrior())
    for number in range(times):
        serve(estimate, work(400 + 100 * (number % 9)))
    return estimate


def test_an_unknown_replica_is_expected_to_be_sensible() -> None:
    """Fewer tokens to compute take less from the first request on, without a queue."""
    estimate = ReplicaEstimate(FleetPrior())
    short, long = estimate.expect(work(100), 0.0), estimate.expect(work(8000), 0.0)
    assert short.queue_s == long.queue_s == 0.0
    assert 0.0 < short.prefill_s < long.prefill_s
    assert long.prefill_s == pytest.approx(8000 * DEFAULT_TOKEN_S)


def test_reusing_is_expected_to_be_faster_than_loading_and_loading_than_computing() -> None:
    """Before anything is known of it."""
    estimate = ReplicaEstimate(FleetPrior())
    reused = estimate.expect(work(100, 7900), 0.0).ttft_s
    loaded = estimate.expect(work(100, 7900, 7900), 0.0).ttft_s
    computed = estimate.expect(work(8000), 0.0).ttft_s
    assert reused < loaded < computed


def test_computing_is_learned() -> None:
    """From what the engine reports."""
    assert learned().expect(work(2000), 0.0).prefill_s == pytest.approx(2000 * TOKEN_S, rel=0.1)


def test_long_prompts_are_remembered_over_many_short_ones() -> None:
    """An hour of warm hits does not make a cold prompt look cheap."""
    estimate = ReplicaEstimate(FleetPrior())
    for _ in range(5):
        serve(estimate, work(8000))
    for _ in range(500):
        serve(estimate, work(20, 4000), prefill_s=0.03, ttft_s=0.03)
    assert estimate.expect(work(8000), 0.0).prefill_s == pytest.approx(8000 * TOKEN_S, rel=0.2)


def test_a_new_replica_begins_with_what_the_fleet_knows() -> None:
    """Through the prior."""
    prior = FleetPrior()
    learned(prior)
    fresh = ReplicaEstimate(prior)
    assert fresh.expect(work(2000), 0.0).prefill_s == pytest.approx(2000 * TOKEN_S, rel=0.1)


def test_a_slower_replica_is_told_apart() -> None:
    """Each learns by which factor it differs."""
    prior = FleetPrior()
    fast, slow = ReplicaEstimate(prior), ReplicaEstimate(prior)
    for number in range(100):
        done = work(400 + 100 * (number % 9))
        serve(fast, done)
        serve(slow, done, prefill_s=3 * TOKEN_S * done.uncached_tokens, ttft_s=None)
    ratio = slow.expect(work(1000), 0.0).prefill_s / fast.expect(work(1000), 0.0).prefill_s
    assert ratio == pytest.approx(3.0, rel=0.15)


def test_one_outlier_changes_little() -> None:
    """A prompt that took a hundred times as long was preempted, or met a compilation."""
    estimate = learned(times=50)
    before = estimate.expect(work(1000), 0.0).ttft_s
    serve(estimate, work(1000), prefill_s=50.0, ttft_s=50.0)
    assert estimate.expect(work(1000), 0.0).ttft_s < 1.6 * before


def test_computing_is_learned_without_the_engine_s_report() -> None:
    """From the whole time of requests that met no queue."""
    estimate = ReplicaEstimate(FleetPrior())
    for number in range(30):
        serve(estimate, work(400 + 100 * (number % 9)), queue_s=None, prefill_s=None)
    assert estimate.expect(work(2000), 0.0).prefill_s == pytest.approx(2000 * TOKEN_S, rel=0.15)


def test_loads_are_learned() -> None:
    """Per token."""
    estimate = ReplicaEstimate(FleetPrior())
    for _ in range(60):
        serve(estimate, work(100, 2000, 2000), load_s=0.2)
    assert estimate.expect(work(100, 4000, 4000), 0.0).load_s == pytest.approx(0.4, rel=0.15)


def test_the_queue_is_what_is_not_computed_yet() -> None:
    """The sum of the prompts ahead."""
    estimate = learned()
    estimate.sent("a", work(1000), 100.0)
    estimate.sent("b", work(2000), 100.0)
    assert estimate.expect(work(1), 100.0).queue_s == pytest.approx(3000 * TOKEN_S, rel=0.1)
    estimate.first_token("a", 100.5)
    assert estimate.expect(work(1), 100.5).queue_s == pytest.approx(2000 * TOKEN_S, rel=0.1)
    estimate.first_token("b", 101.5)
    assert estimate.expect(work(1), 101.5).queue_s == 0.0


def test_the_first_in_the_queue_makes_progress() -> None:
    """By the time since it was sent, or since the one before it was done."""
    estimate = learned()
    estimate.sent("a", work(2000), 100.0)
    assert estimate.expect(work(1), 100.6).queue_s == pytest.approx(0.4, abs=0.1)


def test_a_replica_that_is_late_looks_later_the_longer_it_takes() -> None:
    """One that hangs is avoided before its health check fails, within bounds."""
    estimate = learned()
    estimate.sent("a", work(100), 100.0)
    waits = [estimate.expect(work(1), 100.0 + s).queue_s for s in (0.1, 1.0, 10.0, 300.0)]
    assert waits == sorted(waits)
    assert waits[2] > 2.0
    assert waits[3] < 100.0


def test_running_requests_do_not_queue() -> None:
    """After their first token they are counted as running."""
    estimate = ReplicaEstimate(FleetPrior())
    estimate.sent("a", work(1000), 0.0)
    assert (estimate.running, estimate.waiting) == (0, 1)
    estimate.first_token("a", 0.1)
    assert (estimate.running, estimate.waiting) == (1, 0)
    estimate.ended("a", 0.2, None)
    assert (estimate.running, estimate.waiting) == (0, 0)


def test_a_request_may_end_twice_or_never_have_begun() -> None:
    """Clients leave at any moment."""
    estimate = ReplicaEstimate(FleetPrior())
    estimate.sent("a", work(1000), 0.0)
    for _ in range(2):
        estimate.ended("a", 0.1, None)
        estimate.first_token("a", 0.1)
        estimate.ended("unknown", 0.1, None)
    assert (estimate.running, estimate.waiting) == (0, 0)
    assert estimate.expect(work(1), 0.1).queue_s == 0.0


def test_a_request_that_is_sent_again_counts_once() -> None:
    """Under the same key."""
    estimate = ReplicaEstimate(FleetPrior())
    estimate.sent("a", work(1000), 0.0)
    estimate.sent("a", work(1000), 0.0)
    assert estimate.waiting == 1
    assert estimate.expect(work(1), 0.0).queue_s == pytest.approx(1000 * DEFAULT_TOKEN_S)


def test_requests_that_never_end_are_forgotten() -> None:
    """Nothing leaks."""
    estimate = ReplicaEstimate(FleetPrior())
    estimate.sent("pending", work(1000), 0.0)
    estimate.sent("running", work(1000), 0.0)
    estimate.first_token("running", 0.1)
    estimate.polled(IDLE, PENDING_EXPIRY_S + 1)
    assert (estimate.running, estimate.waiting) == (1, 0)
    estimate.polled(IDLE, RUNNING_EXPIRY_S + 1)
    assert (estimate.running, estimate.waiting) == (0, 0)


def test_requests_beyond_a_bound_replace_the_oldest() -> None:
    """However fast they come."""
    estimate = ReplicaEstimate(FleetPrior())
    for number in range(MAX_REQUESTS + 100):
        estimate.sent(str(number), work(10), 0.0)
    assert estimate.waiting == MAX_REQUESTS


def test_others_requests_count_once() -> None:
    """The gauges include ours."""
    estimate = ReplicaEstimate(FleetPrior())
    estimate.sent("a", work(1000), 0.0)
    estimate.sent("b", work(1000), 0.0)
    estimate.first_token("a", 0.0)
    estimate.polled(EngineLoad(5, 3, kv_free=0.4), 0.0)
    assert estimate.running + estimate.waiting == 8
    assert estimate.waiting == 3
    assert estimate.kv_free == 0.4


def test_others_that_wait_prolong_the_queue_until_they_are_served() -> None:
    """By as much as a typical prompt takes; what was polled gets old."""
    estimate = learned()
    estimate.polled(EngineLoad(0, 4), 100.0)
    queue_s = estimate.expect(work(1), 100.0).queue_s
    assert queue_s > 0.0
    assert 0.0 < estimate.expect(work(1), 100.0 + queue_s / 2).queue_s < queue_s
    assert estimate.expect(work(1), 100.0 + GAUGES_EXPIRY_S).queue_s == 0.0


def test_gauges_expire() -> None:
    """When the engine does not answer polls any more."""
    estimate = ReplicaEstimate(FleetPrior())
    estimate.polled(EngineLoad(5, 3, kv_free=0.4), 0.0)
    estimate.sent("a", work(1), GAUGES_EXPIRY_S + 1)
    assert (estimate.running, estimate.waiting, estimate.kv_free) == (0, 1, None)


def test_a_restart_empties_the_queue_and_keeps_what_was_learned() -> None:
    """A new incarnation of the same engine."""
    estimate = learned()
    estimate.sent("a", work(1000), 0.0)
    estimate.polled(EngineLoad(5, 3, kv_free=0.4), 0.0)
    estimate.restarted()
    estimate.ended("a", 0.1, observed(work(1000)))
    assert (estimate.running, estimate.waiting, estimate.kv_free) == (0, 0, None)
    expected = estimate.expect(work(2000), 0.0)
    assert expected.queue_s == 0.0
    assert expected.prefill_s == pytest.approx(2000 * TOKEN_S, rel=0.1)


def test_queues_that_take_longer_than_their_prompts_are_learned() -> None:
    """Running requests slow the computing of waiting ones down."""
    estimate = learned()
    for _ in range(100):
        estimate.sent("ahead", work(1000), 0.0)
        estimate.sent("a", work(1000), 0.0)
        estimate.first_token("ahead", 1.0)
        estimate.ended("ahead", 1.0, None)
        estimate.ended("a", 1.5, observed(work(1000), queue_s=1.0, ttft_s=1.5))
    estimate.sent("ahead", work(1000), 0.0)
    assert estimate.expect(work(1), 0.0).queue_s == pytest.approx(1.0, rel=0.2)


def test_who_gets_short_prompts_only_does_not_look_slow() -> None:
    """Networks and the ends of steps add the same milliseconds to every prompt: most, relatively,
    to the shortest. Who looked slow would get no long ones, and would stay so."""
    prior = FleetPrior()
    short, long_ = ReplicaEstimate(prior), ReplicaEstimate(prior)
    late_s = random.Random(1)
    for number in range(400):
        for estimate, tokens in ((short, 20), (long_, 2000 + 100 * (number % 9))):
            added_s = late_s.expovariate(1 / 0.008)
            prefill_s = tokens * TOKEN_S + added_s
            done = observed(work(tokens), prefill_s=prefill_s, ttft_s=prefill_s + added_s)
            estimate.sent("a", done.work, 0.0)
            estimate.ended("a", 0.0, done)
    one, other = (each.expect(work(3000), 0.0).ttft_s for each in (short, long_))
    assert one == pytest.approx(other, rel=0.05)


ROOM = 10_000
FULL = EngineLoad(1, 0, kv_free=0.1, kv_tokens=ROOM)


def holding(estimate: ReplicaEstimate) -> ReplicaEstimate:
    """One request has filled nine tenths of the memory; such ones keep theirs for 8 s."""
    for _ in range(200):
        estimate.sent("before", work(9000), 0.0)
        estimate.first_token("before", 1.0)
        estimate.ended("before", 9.0, None)
    estimate.sent("big", work(9000), 10.0)
    estimate.first_token("big", 10.5)
    estimate.polled(FULL, 11.0)
    return estimate


def test_who_does_not_fit_waits_for_memory() -> None:
    """As long as it takes, typically, until so much is given back."""
    estimate = holding(learned())
    assert estimate.expect(work(1000), 11.0).queue_s == 0.0
    assert estimate.expect(work(6000), 11.0).queue_s == pytest.approx(0.5 * 8.0, rel=0.05)


def test_what_does_not_fit_is_not_reused_either() -> None:
    """Its cached blocks are what the others will take. Stored ones stay where they are."""
    estimate = holding(learned())
    fits, cached, stored = work(100, 900), work(100, 5900), Work(100, 5900, 5900)
    assert estimate.expect(fits, 11.0).prefill_s < 200 * TOKEN_S
    assert estimate.expect(cached, 11.0).prefill_s == pytest.approx(5100 * TOKEN_S, rel=0.1)
    assert estimate.expect(stored, 11.0).prefill_s < 200 * TOKEN_S


def test_prompts_that_share_memory_fit_together() -> None:
    """Ten conversations of one long system prompt: what they fill says the gauge."""
    estimate = learned()
    for number in range(10):
        estimate.sent(str(number), work(100, 4900), 0.0)
        estimate.first_token(str(number), 0.1)
    for second in range(30):
        estimate.polled(EngineLoad(10, 0, kv_free=0.4, kv_tokens=ROOM), float(second))
    assert estimate.expect(work(100, 4900), 30.0).queue_s == 0.0


def test_an_engine_that_does_not_say_its_memory_is_never_full() -> None:
    """What was learned of it is too vague to send requests away."""
    estimate = holding(learned())
    estimate.polled(EngineLoad(1, 0, kv_free=0.1), 12.0)
    assert estimate.expect(work(6000), 12.0).queue_s == 0.0


def test_expected_parts_add_up() -> None:
    """To the time to first token."""
    assert Expected(1.0, 2.0, 3.0).ttft_s == 6.0

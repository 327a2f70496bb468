"""Accounting: what a request adds to which numbers, and when it leaves a window."""

import tracemalloc
from collections.abc import Callable

import pytest
from pieces import at_once

from gateway.accounts.accounting import Accounting
from gateway.accounts.gauges import EventGauges, Gauges, ReplicaGauges
from gateway.accounts.record import FirstToken, Outcome, PromptTokens, RequestRecord
from gateway.accounts.stats_schema import CacheStats, WindowStats

BLOCK = 32


class Clock:
    """A clock that moves when told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def request(
    *,
    replica: str | None = "a",
    outcome: Outcome = Outcome.OK,
    total: int = 1000,
    device: int = 0,
    memory: int = 0,
    disk: int = 0,
    redis: int = 0,
    prefill_s: float | None = 0.5,
    rendered: bool = True,
    mismatch: bool = False,
    load_s: float = 0.0,
    unattributed: int = 0,
) -> RequestRecord:
    known = prefill_s is not None
    first = FirstToken(
        ttft_s=0.6,
        gateway_s=0.01,
        queue_s=0.02 if known else None,
        prefill_s=prefill_s,
        delivery_s=-0.001 if known else None,
    )
    delivered = device + memory + disk + redis
    prompt = PromptTokens(
        total=total,
        seen=delivered + 96,
        available=delivered + 64,
        captured=delivered + 32,
        delivered_device=device,
        delivered_memory=memory,
        delivered_disk=disk,
        delivered_redis=redis,
        unattributed=unattributed,
    )
    return RequestRecord(
        request_id="r",
        tenant="default",
        model="m",
        replica=replica,
        outcome=outcome,
        status=200,
        stream=True,
        started_at=0.0,
        duration_s=1.0,
        prompt=prompt if rendered else None,
        first_token=first if outcome is Outcome.OK else None,
        output_tokens=7,
        load_s=load_s,
        rendering_mismatch=mismatch,
        unrendered=not rendered,
    )


@pytest.fixture
def clock() -> Clock:
    return Clock()


def accounting_of(clock: Callable[[], float], *replicas: str) -> Accounting:
    return Accounting(replicas or ("a", "b"), model="m", version="1", block_size=BLOCK, clock=clock)


def stats_of(accounting: Accounting) -> CacheStats:
    return at_once(accounting.snapshot(gauges=Gauges(in_flight=0, waiting=0)))


def total_of(accounting: Accounting) -> WindowStats:
    return stats_of(accounting).total.windows.since_start


def test_nothing_happened_means_null_not_zero(clock: Clock) -> None:
    """Rates, percentiles and savings of no requests are unknown."""
    window = total_of(accounting_of(clock))
    assert window.requests.total == 0
    assert window.hit_rates.by_request is None
    assert window.hit_rates.by_token is None
    assert window.prefill_saved.saved_s is None
    assert window.prefill_saved.error_s is None
    assert window.first_token.total.p50_s is None
    assert window.first_token.total.mean_s is None


def test_requests_are_counted_by_outcome(clock: Clock) -> None:
    """Every outcome has its own number, and they add up."""
    accounting = accounting_of(clock)
    for times, outcome in enumerate(Outcome, start=1):
        for _ in range(times):
            accounting.record(request(outcome=outcome))
    counts = total_of(accounting).requests
    assert (counts.ok, counts.cancelled, counts.refused, counts.engine_error) == (1, 2, 3, 4)
    assert counts.total == 10
    assert total_of(accounting).output_tokens == 70


def test_prompt_tokens_are_a_waterfall_that_adds_up(clock: Clock) -> None:
    """Each token of an answered prompt stands in one step."""
    accounting = accounting_of(clock)
    accounting.record(request(total=1000, device=320, memory=100, disk=50, redis=10))
    accounting.record(request(total=500))
    tokens = total_of(accounting).prompt_tokens
    parts = {"device": 320, "memory": 100, "disk": 50, "redis": 10}
    assert tokens.delivered.model_dump() == parts
    assert (tokens.evicted, tokens.elsewhere, tokens.not_delivered) == (64, 64, 64)
    assert tokens.never_seen == 1500 - 480 - 192
    assert (tokens.total, tokens.uncached) == (1500, 1020)
    rates = total_of(accounting).hit_rates
    assert (rates.hits, rates.requests, rates.by_request) == (1, 2, 0.5)
    assert rates.by_token == pytest.approx(480 / 1500)


def test_prompts_without_an_answer_do_not_dilute_the_hit_rate(clock: Clock) -> None:
    """Of a cancelled request nobody knows what was reused: its tokens are counted apart."""
    accounting = accounting_of(clock)
    accounting.record(request(device=960))
    accounting.record(request(outcome=Outcome.CANCELLED))
    window = total_of(accounting)
    assert window.hit_rates.by_request == 1.0
    assert (window.prompt_tokens.total, window.prompt_tokens.unreported) == (1000, 1000)


@pytest.mark.parametrize(("total", "too_short"), [(31, 1), (32, 1), (33, 0)])
def test_too_short_is_told_apart_from_no_reuse(clock: Clock, total: int, too_short: int) -> None:
    """The engine computes the last token, so a prompt of exactly one block cannot hit either."""
    accounting = accounting_of(clock)
    accounting.record(request(total=total))
    assert total_of(accounting).too_short_requests == too_short


def test_replicas_add_up_to_the_total(clock: Clock) -> None:
    """Requests without a replica are shown apart; those of one that is gone are in the total."""
    accounting = accounting_of(clock)
    for replica in ("a", "a", "b", None, "never-heard-of"):
        accounting.record(request(replica=replica))
    stats = stats_of(accounting)
    assert set(stats.replicas) == {"a", "b"}
    assert stats.replicas["a"].windows.last_1m.requests.total == 2
    assert stats.replicas["b"].windows.last_1m.requests.total == 1
    assert stats.without_replica.windows.last_1m.requests.total == 1
    assert stats.total.windows.last_1m.requests.total == 5


def test_a_replica_that_goes_leaves_its_sums_in_the_total(clock: Clock) -> None:
    """Nothing is forgotten, in no window, and a new replica of the same name begins at 0."""
    accounting = accounting_of(clock)
    accounting.record(request(replica="a"))
    clock.now += 45.0
    accounting.record(request(replica="a"))
    before = stats_of(accounting).total
    accounting.remove_replica("a")
    assert stats_of(accounting).total == before
    assert "a" not in stats_of(accounting).replicas
    accounting.add_replica("a")
    assert stats_of(accounting).replicas["a"].windows.since_start.requests.total == 0
    clock.now += 30.0
    assert stats_of(accounting).total.windows.last_1m.requests.total == 1


def test_ttft_parts_have_their_own_counts(clock: Clock) -> None:
    """A silent engine leaves parts out; clocks that disagree by a little do not go negative."""
    accounting = accounting_of(clock)
    accounting.record(request(prefill_s=0.5))
    accounting.record(request(prefill_s=None))
    times = total_of(accounting).first_token
    assert (times.total.count, times.prefill.count, times.delivery.count) == (2, 1, 1)
    assert times.prefill.p50_s == pytest.approx(0.5, rel=0.05)
    assert times.prefill.mean_s == pytest.approx(0.5)
    assert times.delivery.mean_s == 0.0


def test_savings_need_a_measured_curve(clock: Clock) -> None:
    """A hit before any cold prompt of its length was measured saves an unknown time."""
    accounting = accounting_of(clock)
    accounting.record(request(device=960, prefill_s=0.05))
    saved = total_of(accounting).prefill_saved
    assert saved.saved_s is None
    assert (saved.measured_requests, saved.unmeasured_requests) == (0, 1)


def test_savings_are_predicted_cold_less_measured(clock: Clock) -> None:
    """Against the replica's own curve, with an error bar."""
    accounting = accounting_of(clock)
    for _ in range(5):
        accounting.record(request(prefill_s=0.5))
    accounting.record(request(device=960, prefill_s=0.05))
    accounting.record(request(replica="b", device=960, prefill_s=0.05))
    stats = stats_of(accounting)
    saved = stats.replicas["a"].windows.since_start.prefill_saved
    assert saved.saved_s == pytest.approx(0.45)
    assert saved.error_s == pytest.approx(0.0)
    assert stats.replicas["b"].windows.since_start.prefill_saved.saved_s is None
    assert stats.total.windows.since_start.prefill_saved.measured_requests == 1
    assert stats.total.windows.since_start.prefill_saved.unmeasured_requests == 1
    assert stats.replicas["a"].prefill_curve[0].observations == 5


def test_a_load_slower_than_cold_is_a_loss(clock: Clock) -> None:
    """What a load takes is no saving, and a loss is not hidden behind the savings of others."""
    accounting = accounting_of(clock)
    accounting.record(request(prefill_s=0.5))
    accounting.record(request(memory=960, prefill_s=0.1, load_s=0.1))
    accounting.record(request(memory=960, prefill_s=0.1, load_s=0.6))
    saved = total_of(accounting).prefill_saved
    assert (saved.measured_requests, saved.losing_requests) == (2, 1)
    assert saved.saved_s == pytest.approx(0.3)
    assert saved.lost_s == pytest.approx(0.2)
    assert saved.net_s == pytest.approx(0.1)


def test_a_load_that_failed_is_a_loss_without_any_curve(clock: Clock) -> None:
    """Nothing was reused, and the time is gone."""
    accounting = accounting_of(clock)
    accounting.record(request(load_s=0.25))
    saved = total_of(accounting).prefill_saved
    assert (saved.saved_s, saved.lost_s, saved.losing_requests) == (0.0, 0.25, 1)
    assert (saved.measured_requests, saved.unmeasured_requests) == (0, 0)


def test_no_reuse_saves_exactly_nothing(clock: Clock) -> None:
    """Without hits the saving is known: 0. Noise of cold requests never counts as a saving."""
    accounting = accounting_of(clock)
    accounting.record(request(prefill_s=0.5))
    accounting.record(request(prefill_s=0.3))
    saved = total_of(accounting).prefill_saved
    assert (saved.saved_s, saved.lost_s, saved.error_s) == (0.0, 0.0, 0.0)


def test_rendering_troubles_are_counted(clock: Clock) -> None:
    """Mismatches and prompts that were only passed on."""
    accounting = accounting_of(clock)
    accounting.record(request(mismatch=True))
    accounting.record(request(rendered=False))
    window = total_of(accounting)
    assert (window.rendering_mismatches, window.unrendered_prompts) == (1, 1)
    assert window.hit_rates.requests == 1


def test_checked_renderings_are_counted(clock: Clock) -> None:
    """All samples, and those that nothing confirmed."""
    accounting = accounting_of(clock)
    accounting.rendering_checked("a", True)
    accounting.rendering_checked("a", False)
    window = stats_of(accounting).replicas["a"].windows.last_1m
    assert (window.renderings_checked, window.renderings_unconfirmed) == (2, 1)
    assert total_of(accounting).renderings_unconfirmed == 1


def test_tokens_of_unknown_origin_are_counted(clock: Clock) -> None:
    """They are part of the device's."""
    accounting = accounting_of(clock)
    accounting.record(request(device=320, unattributed=64))
    tokens = total_of(accounting).prompt_tokens
    assert (tokens.delivered.device, tokens.unattributed, tokens.unreported) == (320, 64, 0)


def test_windows_forget_and_since_start_does_not(clock: Clock) -> None:
    """Each window drops a request when its span has passed."""
    accounting = accounting_of(clock)
    accounting.record(request())
    seen = []
    for later_s in (30.0, 120.0, 900.0, 4000.0):
        clock.now = 1000.0 + later_s
        windows = stats_of(accounting).total.windows
        seen.append(
            [
                windows.last_1m.requests.total,
                windows.last_10m.requests.total,
                windows.last_1h.requests.total,
                windows.since_start.requests.total,
            ]
        )
    assert seen == [[1, 1, 1, 1], [0, 1, 1, 1], [0, 0, 1, 1], [0, 0, 0, 1]]


def test_windows_say_how_long_they_are(clock: Clock) -> None:
    """Right after the start a window is as long as the uptime."""
    accounting = accounting_of(clock)
    clock.now += 12.5
    windows = stats_of(accounting).total.windows
    assert {windows.last_1m.covered_s, windows.last_1h.covered_s} == {12.5}
    clock.now += 10_000
    stats = stats_of(accounting)
    assert 60 <= stats.total.windows.last_1m.covered_s < 61
    assert 3600 <= stats.total.windows.last_1h.covered_s < 3660
    assert stats.uptime_s == stats.total.windows.since_start.covered_s == 10_012.5


def test_gauges_are_passed_on(clock: Clock) -> None:
    """What the caller knows of the present stands in the snapshot."""
    state = ReplicaGauges(in_flight=1, events=EventGauges(connected=True, last_sequence=9))
    gauges = Gauges(in_flight=3, waiting=2, loop_lag_s=0.01, replicas={"a": state, "gone": state})
    stats = at_once(accounting_of(clock).snapshot(gauges=gauges))
    assert (stats.in_flight, stats.waiting, stats.loop_lag_s) == (3, 2, 0.01)
    assert stats.replicas["a"].state == state
    assert stats.replicas["b"].state == ReplicaGauges()
    assert stats.store is None


def test_memory_does_not_grow_with_traffic(clock: Clock) -> None:
    """Once every ring has turned, two more hours of traffic allocate nothing lasting."""
    accounting = accounting_of(clock)

    def two_hours() -> None:
        for second in range(0, 7200, 3):
            clock.now += 3
            accounting.record(request(total=100 + second, memory=64))

    two_hours()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    two_hours()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 100_000

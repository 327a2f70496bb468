"""The circuit breaker: when nobody waits for a broken server any more, and when again."""

from __future__ import annotations

from prefix_store.breaker import BreakerSettings, CircuitBreaker


def opened(settings: BreakerSettings | None = None) -> CircuitBreaker:
    breaker = CircuitBreaker(settings)
    while not breaker.failed(100.0):
        pass
    return breaker


def test_only_faults_in_a_row_open_it() -> None:
    """A success between them starts the count again."""
    breaker = CircuitBreaker(BreakerSettings(faults_to_open=3))
    for _ in range(5):
        assert not breaker.failed(0.0)
        assert not breaker.failed(0.0)
        breaker.succeeded()
    assert breaker.is_closed
    assert [breaker.failed(0.0) for _ in range(3)] == [False, False, True]
    assert breaker.state == "open"


def test_one_probe_at_a_time_goes_through() -> None:
    """Not before its time, and never two."""
    breaker = opened(BreakerSettings(first_pause_s=1.0))
    assert not breaker.begin_probe(100.9)
    assert breaker.begin_probe(101.0)
    assert breaker.state == "half_open"
    assert not breaker.begin_probe(200.0)


def test_pauses_grow_up_to_a_limit_and_start_again() -> None:
    """Each failed probe doubles the pause; a success forgets that."""
    breaker = opened(BreakerSettings(first_pause_s=1.0, longest_pause_s=5.0))
    now, pauses = 100.0, []
    for _ in range(5):
        pauses.append(breaker.wait_s(now))
        now += pauses[-1]
        assert breaker.begin_probe(now)
        breaker.failed(now)
    assert pauses == [1.0, 2.0, 4.0, 5.0, 5.0]
    breaker.succeeded()
    assert breaker.is_closed
    while not breaker.failed(now):
        pass
    assert breaker.wait_s(now) == 1.0


def test_faults_of_what_was_under_way_do_not_prolong_the_pause() -> None:
    """They tell nothing new."""
    breaker = opened(BreakerSettings(first_pause_s=1.0))
    assert not breaker.failed(100.9)
    assert breaker.begin_probe(101.0)


def test_a_closed_breaker_needs_no_probe() -> None:
    """Nothing to wait for."""
    breaker = CircuitBreaker()
    assert not breaker.begin_probe(1e9)
    assert breaker.wait_s(0.0) == 0.0
    assert breaker.state == "closed"

"""What clients are told about when to come again."""

from __future__ import annotations

from gateway.fleet.turnover import Turnover


def test_without_any_knowledge_it_is_one_second():
    """Nothing is known of how long answers take."""
    turnover = Turnover()
    assert turnover.retry_after_s(1000, 5.0) == 1
    turnover.full(5.0)
    assert turnover.retry_after_s(1000, 5.0) == 1


def test_it_is_the_time_until_all_who_wait_had_their_turn():
    """Two places a second, nine wait: with the newcomer that is five seconds."""
    turnover = Turnover()
    turnover.full(0.0)
    for number in range(1, 21):
        turnover.freed(number * 0.5)
    assert turnover.retry_after_s(9, 10.0) == 5


def test_only_the_last_places_count():
    """It has become faster lately."""
    turnover = Turnover()
    turnover.full(0.0)
    for number in range(10):
        turnover.freed(100.0 * number)
    for number in range(100):
        turnover.freed(1000.0 + number * 0.1)
    assert turnover.retry_after_s(99, 1010.0) in (10, 11)


def test_where_nobody_goes_it_grows_to_a_minute():
    """Never more: the client would give up."""
    turnover = Turnover()
    turnover.full(0.0)
    assert turnover.retry_after_s(3, 7.5) == 8
    assert turnover.retry_after_s(3, 500.0) == 60
    turnover.freed(500.0)
    assert turnover.retry_after_s(3, 500.0) == 60


def test_a_quiet_hour_says_nothing():
    """Places that become free while others are free show how many came, not how many could."""
    turnover = Turnover()
    turnover.freed(0.0)
    turnover.full(100.0)
    turnover.freed(101.0)
    turnover.idle()
    turnover.full(4000.0)
    assert turnover.retry_after_s(100, 4000.0) == 1

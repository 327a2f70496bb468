"""The prompts that an engine has still to compute."""

from __future__ import annotations

import pytest

from policies.routing.prefill_queue import MAX_OVERDUE_S, PrefillQueue


def test_prompts_add_up() -> None:
    """In seconds of computing."""
    queue = PrefillQueue()
    queue.add("a", 1.0, 0.0)
    queue.add("b", 2.0, 0.0)
    assert (len(queue), "a" in queue, "c" in queue) == (2, True, False)
    assert queue.seconds(0.0) == 3.0


def test_only_the_first_one_makes_progress() -> None:
    """The next one begins when it has left."""
    queue = PrefillQueue()
    queue.add("a", 1.0, 0.0)
    queue.add("b", 2.0, 0.0)
    assert queue.seconds(0.75) == pytest.approx(2.25)
    queue.remove("a", 1.25)
    assert queue.seconds(1.25) == pytest.approx(2.0)
    assert queue.seconds(1.75) == pytest.approx(1.5)


def test_one_that_leaves_from_the_middle_takes_its_work_with_it() -> None:
    """Its client has gone."""
    queue = PrefillQueue()
    for key in "abc":
        queue.add(key, 1.0, 0.0)
    queue.remove("b", 0.0)
    assert queue.seconds(0.0) == pytest.approx(2.0)


def test_one_that_is_late_is_expected_to_stay_late() -> None:
    """Up to a bound."""
    queue = PrefillQueue()
    queue.add("a", 1.0, 0.0)
    assert queue.seconds(1.0) == 0.0
    assert queue.seconds(5.0) == pytest.approx(2.0)
    assert queue.seconds(10_000.0) == MAX_OVERDUE_S


def test_an_empty_queue_takes_exactly_no_time() -> None:
    """Rounding leaves nothing, also after many prompts."""
    queue = PrefillQueue()
    for number in range(1000):
        queue.add(str(number), 0.1 + number / 3, 0.0)
    for number in range(999, -1, -1):
        queue.remove(str(number), 0.0)
    assert queue.seconds(0.0) == 0.0
    queue.add("a", 0.1, 0.0)
    assert queue.seconds(0.0) == 0.1


def test_a_cleared_queue_is_empty() -> None:
    """After a restart."""
    queue = PrefillQueue()
    queue.add("a", 1.0, 0.0)
    queue.clear()
    assert (len(queue), queue.oldest(), queue.seconds(0.0)) == (0, None, 0.0)

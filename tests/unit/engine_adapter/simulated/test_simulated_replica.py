"""The simulated engine on the event loop's clock, which is turned by hand here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from engine_adapter.simulated.options import SimulationOptions
from engine_adapter.simulated.replica import Replica
from engine_adapter.simulated.sequence import Job, Sequence
from engine_adapter.simulated.timing import StepTiming
from prefix_store.hashing import as_token_ids


class Timer:
    """One call_at."""

    def __init__(self, when: float, call: Callable[[], None]) -> None:
        self.when = when
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        self.call = None


class HandLoop:
    """A clock and timers; `late_s` is how late every timer fires."""

    def __init__(self) -> None:
        self.now = 100.0
        self.timers: list[Timer] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, call: Callable[[], None]) -> Timer:
        self.timers.append(Timer(when, call))
        return self.timers[-1]

    def run(self, late_s: float = 0.0) -> None:
        """All timers, each so late."""
        while waiting := [timer for timer in self.timers if timer.call is not None]:
            timer = min(waiting, key=lambda timer: timer.when)
            self.now = max(self.now, timer.when + late_s)
            call, timer.call = timer.call, None
            assert call is not None
            call()


def replica(loop: HandLoop, **options: Any) -> Replica:
    """A second a step, twice as fast as real time."""
    timing = StepTiming(1.0, 0.0, 0.0, 0.0, 0.0)
    chosen = SimulationOptions(
        "m", timing=timing, speed=2.0, kv_tokens=16_000, max_model_len=16_000, **options
    )
    return Replica(chosen, None, cast("Any", loop))


def job(length: int = 5, answer: int = 4) -> Job:
    return Job(as_token_ids(range(length)), as_token_ids(range(answer)), streams=True)


def nothing(_: Sequence, __: float) -> None:
    """Nobody waits."""


def test_steps_take_real_time_by_the_speed() -> None:
    """Four steps of a second are two real seconds."""
    loop = HandLoop()
    one = replica(loop)
    sequence = one.submit(job(), nothing)
    loop.run()
    assert sequence.is_finished
    assert loop.now == pytest.approx(102.0)


def test_late_timers_make_nothing_longer() -> None:
    """The simulated times are the same, and only the last timer's delay is left."""
    loop = HandLoop()
    one = replica(loop)
    sequence = one.submit(job(answer=20), nothing)
    loop.run(late_s=0.03)
    assert sequence.finished_at == pytest.approx(20.0)
    assert loop.now == pytest.approx(110.03)
    assert one.latest_s == pytest.approx(0.03)
    assert one.lost_s == 0.0


def test_a_process_that_was_stopped_has_computed_nothing() -> None:
    """Lost time is lost: the clock is set back instead of running many steps at once."""
    loop = HandLoop()
    one = replica(loop)
    seen: list[int] = []
    sequence = one.submit(job(answer=10), lambda each, _: seen.append(each.num_generated))
    loop.now += 60.0
    assert not sequence.is_finished
    loop.run()
    assert seen == list(range(1, 11))
    assert loop.now == pytest.approx(160.0 + 9 * 0.5)
    assert one.lost_s == pytest.approx(59.5)


def test_an_arrival_is_taken_into_account_with_the_step_after_it() -> None:
    """Even when the timer of the running one is late."""
    loop = HandLoop()
    one = replica(loop)
    first = one.submit(job(answer=6), nothing)
    loop.now += 0.6  # the first step has been over for 0.1 s
    second = one.submit(job(3, 1), nothing)
    assert first.num_generated == 1
    loop.run()
    assert second.scheduled_at == pytest.approx(2.0)
    assert first.finished_at == pytest.approx(6.0)


def test_a_halted_replica_takes_requests_and_goes_on_where_it_stopped() -> None:
    """Its clock stands still."""
    loop = HandLoop()
    one = replica(loop)
    first = one.submit(job(answer=4), nothing)
    loop.now += 0.75
    one.halt()
    one.halt()
    second = one.submit(job(3, 1), nothing)
    loop.now += 500.0
    loop.run()
    assert (first.num_generated, second.num_generated) == (1, 0)
    one.resume()
    one.resume()
    loop.run()
    assert first.finished_at == pytest.approx(4.0)
    assert second.is_finished


def test_abort_and_close_leave_no_timer() -> None:
    """Nothing fires for nobody."""
    loop = HandLoop()
    one = replica(loop)
    one.abort(one.submit(job(answer=400), nothing))
    loop.run()
    assert loop.now == pytest.approx(100.5)  # the running step was not cut short
    one.submit(job(), nothing)
    one.close()
    loop.run()
    assert loop.now == pytest.approx(100.5)

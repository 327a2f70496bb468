"""Which requests make their engine report what it reuses."""

from __future__ import annotations

import itertools

import pytest

from gateway.fleet.report_sampling import MAX_ENGINES, ReportSampler


class Rig:
    """A sampler with a clock, and an engine that teaches what the test says."""

    def __init__(self) -> None:
        self.now = 0.0
        self.learned: int | None = 0
        self.sampler = ReportSampler(
            lambda engine_id: self.learned,
            share=0.25,
            min_interval_s=1.0,
            max_interval_s=8.0,
            clock=lambda: self.now,
        )

    def lack(self, engine_id: str = "a") -> None:
        self.sampler.noticed(engine_id, 64, 96)

    def asked(self, requests: int, step_s: float, *, teaches: int = 0) -> list[float]:
        """When reports were asked for, if all of so many requests find the index lacking."""
        times = []
        for _ in range(requests):
            self.lack()
            if self.sampler.wants_full("a"):
                times.append(self.now)
                self.learned = (self.learned or 0) + teaches
            self.now += step_s
        return times


def pauses(times: list[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(times)]


@pytest.mark.parametrize(("predicted", "delivered"), [(0, 0), (64, 64), (64, 32)])
def test_nothing_is_asked_while_the_index_knows_all(predicted: int, delivered: int) -> None:
    """Also where the engine had evicted what was predicted."""
    rig = Rig()
    rig.sampler.noticed("a", predicted, delivered)
    assert not rig.sampler.wants_full("a")


def test_first_lack_is_answered_at_once_and_once() -> None:
    """Only for the replica that was found lacking."""
    rig = Rig()
    rig.lack()
    assert not rig.sampler.wants_full("b")
    assert rig.sampler.wants_full("a")
    rig.now += 100.0
    assert not any(rig.sampler.wants_full("a") for _ in range(10))


def test_reports_that_teach_come_again_after_a_pause() -> None:
    """At most so many a second, however many requests there are."""
    assert Rig().asked(640, 1 / 64, teaches=5) == [float(n) for n in range(10)]


def test_reports_are_a_share_of_the_requests() -> None:
    """However long the pauses between them."""
    assert len(Rig().asked(100, 10.0, teaches=5)) == 25


def test_reports_that_teach_nothing_become_rare() -> None:
    """Such as where prompts that arrived together were taken for lacking; and as soon as they
    teach again they are as frequent as before."""
    rig = Rig()
    assert pauses(rig.asked(400, 1 / 8)) == [2, 4, 8, 8, 8, 8, 8]
    rig.now += 8.0
    assert pauses(rig.asked(32, 1 / 8, teaches=1)) == [1, 1, 1]


def test_engine_without_events_is_never_asked() -> None:
    """It could not teach."""
    rig = Rig()
    rig.learned = None
    assert rig.asked(100, 1.0) == []


def test_engines_that_come_and_go_leave_nothing_behind() -> None:
    """The memory is bounded."""
    rig = Rig()
    for number in range(3 * MAX_ENGINES):
        rig.lack(str(number))
    assert len(rig.sampler._engines) <= MAX_ENGINES

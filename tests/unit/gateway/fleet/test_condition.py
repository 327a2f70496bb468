"""The condition of a replica: each transition of the table, back-off, slow start."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from gateway.fleet.condition import (
    MAX_EJECTION_S,
    QUIET_S,
    SLOW_START_FLOOR,
    Condition,
    State,
    Transition,
)
from policies.fleet import HealthConfig

CONFIG = HealthConfig(failures=3, ejection=1.0, slow_start=20.0)


@dataclass
class Replica:
    """A condition, its clock and what its owner was told."""

    config: HealthConfig = CONFIG
    now: float = 1000.0
    others_settled: bool = False
    changes: list[Transition] = field(default_factory=list)
    condition: Condition = field(init=False)

    def __post_init__(self) -> None:
        self.condition = Condition(
            self.config,
            lambda: self.now,
            others_settled=lambda: self.others_settled,
            changed=self.changes.append,
        )

    def ready(self) -> Replica:
        for _ in range(self.config.successes):
            self.condition.probe_ok()
        assert self.condition.accepts
        return self

    def ejected_for_s(self) -> float:
        """Lets time pass until a probe that succeeds brings it back."""
        assert self.condition.is_lost
        began = self.now
        while not self.condition.accepts:
            self.now += 0.25
            self.condition.probe_ok()
        return self.now - began


def test_a_new_replica_is_starting_and_gets_nothing():
    """Until it answers; what fails meanwhile is told, and is no ejection."""
    replica = Replica()
    condition = replica.condition
    assert condition.state is State.STARTING
    assert condition.state is State.STARTING
    assert condition.may_be_tried
    assert not condition.accepts
    for _ in range(10):
        condition.probe_failed("nothing listens there", refused=True)
        condition.request_failed("nothing listens there", refused=True)
        condition.stalled("not a byte for 60 s")
    assert condition.state is State.STARTING
    assert condition.may_be_tried
    assert not condition.is_lost
    assert condition.reason == "has not answered yet: nothing listens there"
    assert condition.ejections == 0
    assert replica.changes == []


@pytest.mark.parametrize("successes", [1, 3])
def test_probes_in_a_row_make_it_ready(successes):
    """A failure between them begins the count again."""
    replica = Replica(HealthConfig(successes=successes))
    condition = replica.condition
    for _ in range(successes - 1):
        condition.probe_ok()
    condition.probe_failed("no answer")
    for _ in range(successes - 1):
        condition.probe_ok()
    assert condition.state is State.STARTING
    assert condition.may_be_tried
    condition.probe_ok()
    assert condition.accepts
    assert replica.changes == [Transition(State.STARTING, State.READY, "answers")]


def test_an_answered_request_makes_a_starting_replica_ready():
    """There is no better probe."""
    replica = Replica(HealthConfig(successes=5))
    replica.condition.request_ok()
    assert replica.condition.accepts


def test_a_refused_connection_ejects_at_once():
    """Nothing listens: one failure is proof enough, of a probe or of a request."""
    for fail in (Condition.probe_failed, Condition.request_failed):
        replica = Replica().ready()
        fail(replica.condition, "nothing listens there", refused=True)
        assert replica.condition.state is State.EJECTED
        assert replica.condition.reason == "nothing listens there"
        assert replica.condition.is_lost
        assert not replica.condition.accepts


@pytest.mark.parametrize(
    ("fail", "succeed"),
    [
        (Condition.probe_failed, Condition.probe_ok),
        (Condition.request_failed, Condition.request_ok),
    ],
)
def test_other_failures_eject_when_they_come_in_a_row(fail, succeed):
    """A success between them begins the count again."""
    replica = Replica().ready()
    for _ in range(2):
        fail(replica.condition, "status 500")
    succeed(replica.condition)
    for _ in range(2):
        fail(replica.condition, "status 500")
    assert replica.condition.accepts
    fail(replica.condition, "status 500")
    assert replica.condition.is_lost
    assert replica.condition.reason == "status 500, 3 times in a row"


def test_probes_do_not_hide_failing_requests():
    """An engine may answer /health and fail at its work."""
    replica = Replica().ready()
    for _ in range(3):
        replica.condition.probe_ok()
        replica.condition.request_failed("status 500")
    assert replica.condition.is_lost


def test_a_stalled_replica_must_compute_before_it_is_back():
    """Its probes may well have succeeded all the time."""
    replica = Replica().ready()
    assert not replica.condition.must_compute
    replica.condition.stalled("not a byte for 60 s")
    assert replica.condition.is_lost
    assert replica.condition.must_compute
    replica.ejected_for_s()
    assert not replica.condition.must_compute


def test_late_failures_of_an_ejected_replica_say_nothing_new():
    """Requests that were sent before the ejection fail one after another behind it."""
    replica = Replica().ready()
    replica.condition.probe_failed("nothing listens there", refused=True)
    for _ in range(100):
        replica.condition.request_failed("broke off")
    assert replica.condition.ejections == 1
    assert replica.ejected_for_s() == CONFIG.ejection
    replica.condition.request_failed("status 500")
    replica.condition.request_failed("status 500")
    assert replica.condition.accepts


def test_a_replica_that_stays_dead_is_ejected_once():
    """Failing probes keep it away and say why; it is back with the first that succeeds."""
    replica = Replica().ready()
    replica.condition.probe_failed("nothing listens there", refused=True)
    for _ in range(100):
        replica.now += 1.0
        replica.condition.probe_failed("status 503 of /health")
    assert replica.condition.ejections == 1
    assert replica.condition.reason == "status 503 of /health"
    replica.condition.probe_ok()
    assert replica.condition.accepts


def test_ejections_that_follow_soon_get_longer_up_to_a_minute():
    """1, 2, 4 ... 60 s; an ejection after a quiet time is short again."""
    replica = Replica().ready()
    spans = []
    for _ in range(9):
        replica.now += 5.0
        replica.condition.probe_failed("nothing listens there", refused=True)
        spans.append(replica.ejected_for_s())
    assert spans == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, MAX_EJECTION_S, MAX_EJECTION_S, MAX_EJECTION_S]
    replica.now += QUIET_S
    replica.condition.probe_failed("nothing listens there", refused=True)
    assert replica.ejected_for_s() == 1.0
    assert replica.condition.ejections == 10


def test_a_long_shortest_ejection_is_not_shortened():
    """The minute bounds the doubling only."""
    replica = Replica(HealthConfig(ejection=90.0)).ready()
    for _ in range(2):
        replica.condition.probe_failed("nothing listens there", refused=True)
        assert replica.ejected_for_s() == 90.0


def test_a_draining_replica_gets_nothing_until_undrained():
    """It says so, whatever its health is meanwhile."""
    replica = Replica().ready()
    condition = replica.condition
    condition.drain()
    assert condition.state is State.DRAINING
    assert not condition.accepts
    assert condition.reason == "gets no new requests"
    condition.drain()
    condition.undrain()
    assert condition.accepts
    condition.undrain()
    assert [(each.before, each.after) for each in replica.changes[1:]] == [
        (State.READY, State.DRAINING),
        (State.DRAINING, State.READY),
    ]


def test_a_replica_may_be_lost_while_it_drains():
    """Its owner is told; requests that wait for a first byte there go elsewhere."""
    replica = Replica().ready()
    condition = replica.condition
    condition.drain()
    condition.probe_failed("nothing listens there", refused=True)
    assert condition.state is State.DRAINING
    assert condition.is_lost
    reason = "gets no new requests; nothing listens there"
    assert replica.changes[-1] == Transition(State.DRAINING, State.DRAINING, reason)
    condition.undrain()
    assert condition.state is State.EJECTED
    condition.drain()
    replica.now += 1.0
    condition.probe_ok()
    assert not condition.is_lost
    assert not condition.accepts
    assert replica.changes[-1].after is State.DRAINING


def test_a_replica_that_drains_from_the_start_is_not_starting():
    """It is not asked even where nobody else answers."""
    replica = Replica()
    replica.condition.drain()
    assert not replica.condition.may_be_tried
    replica.condition.probe_ok()
    assert not replica.condition.accepts


def test_a_replica_that_joins_others_starts_slowly():
    """From a small share to all of it, in a straight line."""
    replica = Replica(others_settled=True).ready()
    share = replica.condition.share
    assert share(replica.now) == SLOW_START_FLOOR
    assert share(replica.now + 10.0) == pytest.approx((1.0 + SLOW_START_FLOOR) / 2)
    assert share(replica.now - 1.0) == SLOW_START_FLOOR
    assert share(replica.now + 20.0) == 1.0
    assert share(replica.now) == 1.0


def test_a_fleet_that_starts_together_is_not_throttled():
    """Nobody has taken a full share for a while: the very first start, or all came back."""
    replica = Replica(others_settled=False).ready()
    assert replica.condition.share(replica.now) == 1.0
    assert not replica.condition.settled
    replica.now += 20.0
    assert replica.condition.settled


@pytest.mark.parametrize("come_back", ["ejected", "drained", "restarted"])
def test_a_replica_that_comes_back_starts_slowly(come_back):
    """After an ejection, a drain, or a restart that no probe saw."""
    replica = Replica().ready()
    replica.now += 100.0
    replica.others_settled = True
    assert replica.condition.share(replica.now) == 1.0
    if come_back == "ejected":
        replica.condition.request_failed("nothing listens there", refused=True)
        replica.ejected_for_s()
    elif come_back == "drained":
        replica.condition.drain()
        replica.condition.undrain()
    else:
        replica.condition.restarted()
    assert replica.condition.accepts
    assert replica.condition.share(replica.now) == SLOW_START_FLOOR
    assert not replica.condition.settled


def test_slow_start_can_be_switched_off():
    """slow_start: 0."""
    replica = Replica(HealthConfig(slow_start=0.0), others_settled=True).ready()
    assert replica.condition.share(replica.now) == 1.0
    assert replica.condition.settled


def test_a_restart_forgets_what_counted_against_the_engine_before():
    """It is another process."""
    replica = Replica().ready()
    for _ in range(2):
        replica.condition.request_failed("status 500")
        replica.condition.probe_failed("no answer")
    replica.condition.restarted()
    replica.condition.request_failed("status 500")
    replica.condition.probe_failed("no answer")
    assert replica.condition.accepts


def test_a_restart_clears_no_ejection():
    """A crash loop would never be kept away; a probe brings it back."""
    replica = Replica().ready()
    replica.condition.stalled("not a byte for 60 s")
    replica.condition.restarted()
    assert replica.condition.is_lost
    assert not replica.condition.must_compute


def test_the_age_of_a_state_begins_with_it():
    """Not with a probe that changes nothing."""
    replica = Replica().ready()
    replica.now += 7.0
    replica.condition.probe_ok()
    assert replica.condition.age_s == 7.0
    replica.condition.drain()
    assert replica.condition.age_s == 0.0

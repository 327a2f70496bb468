"""The condition of a replica under any sequence of what may be seen of it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.fleet.condition import MAX_EJECTION_S, Condition, State, Transition
from policies.fleet import HealthConfig

INPUTS = (
    "probe_ok",
    "probe_failed",
    "probe_refused",
    "request_ok",
    "request_failed",
    "request_refused",
    "stalled",
    "drain",
    "undrain",
    "restarted",
)
STEPS = st.lists(
    st.tuples(st.sampled_from(INPUTS), st.sampled_from([0.0, 0.1, 1.0, 7.0, 40.0, 300.0])),
    max_size=60,
)
CONFIGS = st.builds(
    HealthConfig,
    failures=st.integers(1, 4),
    successes=st.integers(1, 4),
    ejection=st.sampled_from([0.1, 1.0, 30.0, 100.0]),
    slow_start=st.sampled_from([0.0, 5.0, 20.0]),
)


class Clock:
    """Stands still unless it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def feed(condition: Condition, name: str) -> None:
    """One thing that is seen."""
    if name.endswith("_refused"):
        getattr(condition, name.replace("_refused", "_failed"))("refused", refused=True)
    elif name.endswith("_failed") or name == "stalled":
        getattr(condition, name)("failed")
    else:
        getattr(condition, name)()


@given(CONFIGS, STEPS, st.booleans())
def test_whatever_happens_the_rules_hold(config, steps, others_settled):
    """Nothing new goes to a replica that is ejected or drains; shares are in (0, 1]; every ejection
    lasts its time and ends within a minute of probes that succeed; the owner misses no change."""
    clock, told = Clock(), list[Transition]()
    condition = Condition(config, clock, others_settled=lambda: others_settled, changed=told.append)
    drains, lost_at = False, 0.0
    for name, passed_s in steps:
        clock.now += passed_s
        before, was_lost, already_told = condition.state, condition.is_lost, len(told)
        feed(condition, name)
        drains = name == "drain" or (drains and name != "undrain")
        assert (condition.state is State.DRAINING) == drains
        assert condition.accepts == (condition.state is State.READY)
        assert not (condition.accepts and (drains or condition.is_lost))
        assert 0.0 < condition.share(clock.now) <= 1.0
        changed = condition.state is not before or condition.is_lost is not was_lost
        assert len(told) - already_told == changed
        if condition.is_lost and not was_lost:
            lost_at = clock.now
        if was_lost and not condition.is_lost:
            assert name == "probe_ok"
            assert clock.now - lost_at >= config.ejection - 1e-9  # floats
    condition.undrain()
    clock.now += max(MAX_EJECTION_S, config.ejection)
    for _ in range(config.successes):
        condition.probe_ok()
    assert condition.accepts


@given(
    st.sampled_from([0.5, 1.0, 30.0, 100.0]),
    st.lists(st.sampled_from([0.0, 5.0, 119.0, 120.0, 500.0]), min_size=1, max_size=20),
)
def test_back_off_doubles_is_bounded_and_forgiven(ejection, gaps):
    """A replica that serves for `gap` seconds between its ejections."""
    clock = Clock()
    config = HealthConfig(ejection=ejection)
    condition = Condition(config, clock, others_settled=lambda: True)
    condition.probe_ok()
    expected, longest = 0.0, max(MAX_EJECTION_S, ejection)
    for gap in gaps:
        clock.now += gap
        condition.request_failed("refused", refused=True)
        expected = min(2 * expected, longest) if expected and gap < 120.0 else ejection
        clock.now += expected - 0.125
        condition.probe_ok()
        assert not condition.accepts
        clock.now += 0.125
        condition.probe_ok()
        assert condition.accepts

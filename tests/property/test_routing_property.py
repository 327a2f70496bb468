"""What holds for every routing policy and estimate, whatever comes."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from policies.routing import (
    Candidate,
    Evidence,
    LeastLoadedRouting,
    LeastTtftRouting,
    PrefixAffinityRouting,
    RoundRobinRouting,
    RouteRequest,
    SessionAffinityRouting,
)
from policies.routing.engine_load import EngineLoad
from policies.routing.replica_estimate import (
    RUNNING_EXPIRY_S,
    FleetPrior,
    Observed,
    ReplicaEstimate,
    Work,
)

KINDS = [
    RoundRobinRouting(),
    LeastLoadedRouting(),
    SessionAffinityRouting(),
    PrefixAffinityRouting(),
    LeastTtftRouting(),
]

SECONDS = st.sampled_from([0.0, 0.5, 0.51, 1.0]) | st.floats(0.0, 100.0)
"""Some of them are near ties."""


def _candidate(replica: str) -> st.SearchStrategy[Candidate]:
    return st.builds(
        Candidate,
        replica=st.just(replica),
        running=st.integers(0, 40),
        waiting=st.integers(0, 40),
        capacity=st.integers(1, 64),
        device_tokens=st.integers(0, 500),
        stored_tokens=st.integers(0, 500),
        queue_s=SECONDS,
        load_s=SECONDS,
        prefill_s=SECONDS,
        kv_free=st.sampled_from([None, 0.2, 0.8]),
        evidence=st.sampled_from(Evidence),
    )


@st.composite
def candidates(draw: st.DrawFn) -> list[Candidate]:
    numbers = draw(st.lists(st.integers(0, 20), min_size=1, max_size=6, unique=True))
    return [draw(_candidate(f"r{number}")) for number in numbers]


REQUESTS = st.builds(
    RouteRequest,
    num_tokens=st.integers(0, 1000),
    session=st.sampled_from(["", "a", "b"]),
    prefix=st.sampled_from([b"", b"p", b"q"]),
)


@settings(max_examples=40)
@given(st.lists(st.tuples(REQUESTS, candidates()), min_size=1, max_size=3))
def test_a_ranking_has_every_candidate_once(
    decisions: list[tuple[RouteRequest, list[Candidate]]],
) -> None:
    """Nobody is lost under any policy, whatever it decided before."""
    for router in [routing.router() for routing in KINDS]:
        for request, given_candidates in decisions:
            ranking = router.decide(request, given_candidates).ranking
            ranked = {score.candidate.replica: score.candidate for score in ranking}
            assert len(ranking) == len(given_candidates)
            assert ranked == {each.replica: each for each in given_candidates}
            assert all(math.isfinite(score.score) for score in ranking)


def _idle(number: int) -> Candidate:
    return Candidate(f"r{number}", 0, 0, 8, 0, 0, 0.0, 0.0, 0.0, None, Evidence.EXACT)


@given(
    st.sets(st.integers(0, 30), min_size=2, max_size=12),
    st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=30),
    st.data(),
)
def test_only_the_sessions_of_a_lost_replica_move(
    numbers: set[int], sessions: list[str], data: st.DataObject
) -> None:
    """And all come back when it does."""
    lost = f"r{data.draw(st.sampled_from(sorted(numbers)))}"
    router = SessionAffinityRouting().router()
    whole = [_idle(number) for number in numbers]
    rest = [each for each in whole if each.replica != lost]

    def homes(present: list[Candidate]) -> dict[str, str]:
        return {
            name: router.decide(RouteRequest(9, name, b""), present).best.replica
            for name in sessions
        }

    before, between, after = homes(whole), homes(rest), homes(whole)
    assert after == before
    assert all(between[name] == home for name, home in before.items() if home != lost)


@given(candidates(), REQUESTS, st.floats(1.01, 3.0))
def test_session_affinity_honours_its_bound(
    given_candidates: list[Candidate], request: RouteRequest, load_factor: float
) -> None:
    """With the request, its replica has at most load_factor times its share, rounded up."""
    router = SessionAffinityRouting(load_factor=load_factor).router()
    best = router.decide(request, given_candidates).best
    requests = 1 + sum(each.running + each.waiting for each in given_candidates)
    share = requests * best.capacity / sum(each.capacity for each in given_candidates)
    assert best.running + best.waiting + 1 <= math.ceil(load_factor * share + 1e-9)


def _room(each: Candidate) -> tuple[float, float]:
    return each.kv_free or 0.0, -each.load


@given(candidates(), REQUESTS)
def test_least_ttft_prefers_no_dominated_candidate(
    given_candidates: list[Candidate], request: RouteRequest
) -> None:
    """No other one has at least as much room and is faster by more than what counts as equal; or
    has more room, is as fast and holds as much of the prompt."""
    routing = LeastTtftRouting()
    decision = routing.router().decide(request, given_candidates)
    best = decision.best
    scores = {each.candidate.replica: each.score for each in decision.ranking}
    best_s = scores[best.replica]
    for other in given_candidates:
        (free, idle), (best_free, best_idle) = _room(other), _room(best)
        other_s = scores[other.replica]
        if free >= best_free and idle >= best_idle:
            assert best_s <= other_s + max(routing.tie, routing.tie_share * other_s) + 1e-9
            if other.reused_tokens >= best.reused_tokens:
                assert other_s > best_s or idle == best_idle


WORKS = st.builds(
    Work,
    uncached_tokens=st.integers(0, 100_000),
    stored_tokens=st.integers(0, 100_000),
    context_tokens=st.integers(0, 100_000),
)
MAYBE_S = st.none() | st.floats(0.0, 1000.0)
OBSERVED = st.none() | st.builds(
    Observed,
    work=WORKS,
    queue_s=MAYBE_S,
    load_s=st.floats(0.0, 1000.0),
    prefill_s=MAYBE_S,
    ttft_s=MAYBE_S,
)
KEYS = st.sampled_from("abcdef")
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("sent"), KEYS, WORKS),
        st.tuples(st.just("first_token"), KEYS, st.none()),
        st.tuples(st.just("ended"), KEYS, OBSERVED),
        st.tuples(st.just("polled"), KEYS, st.integers(0, 9)),
        st.tuples(st.just("restarted"), KEYS, st.none()),
        st.tuples(st.just("later"), KEYS, st.floats(0.0, 1000.0)),
    ),
    max_size=40,
)


class _Life:
    """An estimate and what a caller knows of it."""

    def __init__(self) -> None:
        self.estimate = ReplicaEstimate(FleetPrior())
        self.now = 0.0
        self.others = 0

    def step(self, action: str, key: str, argument: object) -> None:
        estimate = self.estimate
        if action == "sent" and isinstance(argument, Work):
            estimate.sent(key, argument, self.now)
        elif action == "first_token":
            estimate.first_token(key, self.now)
        elif action == "ended":
            assert argument is None or isinstance(argument, Observed)
            estimate.ended(key, self.now, argument)
        elif action == "polled" and isinstance(argument, int):
            estimate.polled(EngineLoad(argument, argument // 2, 0.5, 500 * argument), self.now)
        elif action == "restarted":
            estimate.restarted()
        elif isinstance(argument, float):
            self.now += argument

    def queue_s(self) -> float:
        return self.estimate.expect(Work(1, 0, 0), self.now).queue_s


@given(STEPS)
def test_expectations_are_finite_and_never_negative(
    steps: list[tuple[str, str, object]],
) -> None:
    """Whatever was observed, in whatever order."""
    life = _Life()
    for step in steps:
        life.step(*step)
        expected = life.estimate.expect(Work(1000, 500, 2000), life.now)
        for part in (expected.queue_s, expected.load_s, expected.prefill_s):
            assert 0.0 <= part < math.inf
        assert min(life.estimate.running, life.estimate.waiting) >= 0


@given(STEPS)
def test_when_all_have_ended_nothing_is_left(steps: list[tuple[str, str, object]]) -> None:
    """No request, no queue."""
    life = _Life()
    for step in steps:
        life.step(*step)
    for key in "abcdef":
        life.estimate.ended(key, life.now, None)
    life.estimate.polled(EngineLoad(0, 0), life.now)
    assert (life.estimate.running, life.estimate.waiting) == (0, 0)
    assert life.queue_s() == 0.0


@given(STEPS)
def test_what_never_ends_is_forgotten(steps: list[tuple[str, str, object]]) -> None:
    """The queue does not grow with uptime."""
    life = _Life()
    for step in steps:
        life.step(*step)
    life.step("sent", "a", Work(1000, 0, 0))
    life.step("first_token", "a", None)
    life.step("sent", "b", Work(1000, 0, 0))
    life.now += RUNNING_EXPIRY_S + 1.0
    life.estimate.polled(EngineLoad(0, 0), life.now)
    assert (life.estimate.running, life.estimate.waiting) == (0, 0)
    assert life.queue_s() == 0.0

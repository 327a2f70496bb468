"""The routing policies, each by what it is for."""

from __future__ import annotations

from collections import Counter

import pytest
from pydantic import TypeAdapter, ValidationError

from policies.routing import (
    Candidate,
    Evidence,
    LeastLoadedRouting,
    LeastTtftRouting,
    PrefixAffinityRouting,
    Router,
    RouteRequest,
    Routing,
    SessionAffinityRouting,
)
from policies.routing.hash_ring import MAX_REPLICAS, HashRing
from policies.routing.round_robin import RoundRobinRouting

ANY = RouteRequest(num_tokens=1000, session="", prefix=b"")


def candidate(replica: str, **kwargs: object) -> Candidate:
    """Idle and cold unless said otherwise."""
    given: dict[str, object] = {
        "running": 0,
        "waiting": 0,
        "capacity": 100,
        "device_tokens": 0,
        "stored_tokens": 0,
        "queue_s": 0.0,
        "load_s": 0.0,
        "prefill_s": 0.1,
        "kv_free": None,
        "evidence": Evidence.EXACT,
    }
    return Candidate(replica, **given | kwargs)  # type: ignore[arg-type]


def fleet(size: int = 8) -> list[Candidate]:
    return [candidate(f"r{number}") for number in range(size)]


def chosen(router: Router, candidates: list[Candidate], request: RouteRequest = ANY) -> str:
    return router.decide(request, candidates).best.replica


def session(name: str) -> RouteRequest:
    return RouteRequest(num_tokens=1000, session=name, prefix=b"")


def prefix(name: bytes) -> RouteRequest:
    return RouteRequest(num_tokens=1000, session="", prefix=name)


@pytest.mark.parametrize(
    "kind", ["round_robin", "least_loaded", "session_affinity", "prefix_affinity", "least_ttft"]
)
def test_a_kind_in_yaml_is_a_router(kind: str) -> None:
    """The decision names its policy."""
    routing = TypeAdapter(Routing).validate_python({"kind": kind})
    decision = routing.router().decide(ANY, fleet())
    assert decision.kind == kind
    assert decision.reason


def test_impossible_knobs_are_refused() -> None:
    """A bound of 1 or less leaves keys without a replica."""
    with pytest.raises(ValidationError):
        SessionAffinityRouting(load_factor=1.0)
    with pytest.raises(ValidationError):
        LeastTtftRouting(recompute_weight=-1.0)


def test_round_robin_takes_turns() -> None:
    """Each once before one comes again, in any order of candidates."""
    router = RoundRobinRouting().router()
    turns = [chosen(router, fleet()[::step]) for step in (1, -1) * 4]
    assert turns == [f"r{number}" for number in range(8)]


def test_round_robin_goes_on_when_a_replica_goes() -> None:
    """The turn passes to the next one."""
    router = RoundRobinRouting().router()
    assert chosen(router, fleet()) == "r0"
    assert chosen(router, fleet()[2:]) == "r2"
    assert chosen(router, fleet()) == "r3"


def test_least_load_counts_in_units_of_capacity() -> None:
    """A replica that is new has few places."""
    big, small = candidate("a", running=20), candidate("b", running=5, capacity=10)
    assert chosen(LeastLoadedRouting().router(), [small, big]) == "a"


def test_requests_that_wait_are_load() -> None:
    """Not only those that run."""
    candidates = [candidate("a", waiting=3), candidate("b", running=2)]
    assert chosen(LeastLoadedRouting().router(), candidates) == "b"


@pytest.mark.parametrize("routing", [LeastLoadedRouting(), LeastTtftRouting()])
def test_equals_take_turns(routing: LeastLoadedRouting | LeastTtftRouting) -> None:
    """So that all caches are used, not only the first one's."""
    router = routing.router()
    counts = Counter(chosen(router, fleet()) for _ in range(80))
    assert set(counts.values()) == {10}


def test_a_session_stays() -> None:
    """Whatever else is decided in between."""
    router = SessionAffinityRouting().router()
    homes = {name: chosen(router, fleet(), session(name)) for name in "abcdefgh"}
    chosen(router, fleet(), ANY)
    assert homes == {name: chosen(router, fleet(), session(name)) for name in "abcdefgh"}
    assert len(set(homes.values())) > 2


def test_two_gateways_place_a_session_alike() -> None:
    """Nothing but the names counts."""
    for name in "abcdefgh":
        first = chosen(SessionAffinityRouting().router(), fleet(), session(name))
        assert chosen(SessionAffinityRouting().router(), fleet()[::-1], session(name)) == first


def test_without_a_session_the_prefix_is_the_key_and_without_one_it_goes_in_turn() -> None:
    """Equal prompts meet."""
    router = SessionAffinityRouting().router()
    assert len({chosen(router, fleet(), prefix(b"p")) for _ in range(8)}) == 1
    assert len({chosen(router, fleet(), ANY) for _ in range(8)}) == 8


def test_a_session_whose_replica_is_full_goes_along_the_ring_and_comes_back() -> None:
    """The next replica is always the same one."""
    router = SessionAffinityRouting().router()
    ranking = router.decide(session("a"), fleet()).ranking
    home, second = ranking[0].candidate.replica, ranking[1].candidate.replica
    full = [candidate(each.replica, running=10 * (each.replica == home)) for each in fleet()]
    decision = router.decide(session("a"), full)
    assert decision.best.replica == second
    assert decision.reason == "its session, its replica is full"
    assert chosen(router, fleet(), session("a")) == home


def test_the_ring_forgets_replicas_that_are_gone_when_it_is_full() -> None:
    """Names that come and go for ever do not fill it."""
    ring = HashRing(1)
    for number in range(0, 3 * MAX_REPLICAS, 64):
        ring.order(b"key", [f"r{number + n}" for n in range(64)])
    assert len(ring) <= MAX_REPLICAS


def test_the_longest_prefix_wins() -> None:
    """On the device or in the store."""
    router = PrefixAffinityRouting().router()
    candidates = [
        candidate("a", device_tokens=500),
        candidate("b", device_tokens=100, stored_tokens=600),
        candidate("c"),
    ]
    assert chosen(router, candidates) == "b"


def test_among_equal_prefixes_the_load_decides_then_turns() -> None:
    """A prefix that all hold is not a reason for one of them."""
    router = PrefixAffinityRouting().router()
    idle = [candidate(name, device_tokens=500) for name in "abc"]
    assert {chosen(router, idle) for _ in range(3)} == {"a", "b", "c"}
    loaded = [candidate("a", device_tokens=500, running=2), *idle[1:]]
    assert "a" not in {chosen(router, loaded) for _ in range(4)}


def test_an_overloaded_holder_gives_way() -> None:
    """Hot prefixes spread: to the next one that holds some of it."""
    router = PrefixAffinityRouting(balance_abs=8, balance_rel=1.5).router()
    holder = candidate("a", device_tokens=900, running=9)
    others = [candidate("b", device_tokens=300), candidate("c")]
    decision = router.decide(ANY, [holder, *others])
    assert [score.candidate.replica for score in decision.ranking] == ["b", "c", "a"]
    assert decision.reason == "its replica is overloaded"


def test_a_busy_holder_among_busy_ones_keeps_its_prefix() -> None:
    """Load is judged by the difference."""
    router = PrefixAffinityRouting(balance_abs=8, balance_rel=1.5).router()
    holder = candidate("a", device_tokens=900, running=30)
    assert chosen(router, [holder, candidate("b", running=24)]) == "a"


def test_equal_prompts_that_nobody_knows_meet() -> None:
    """By the hash of their start; different ones spread."""
    router = PrefixAffinityRouting().router()
    homes = [chosen(router, fleet(), prefix(b"%d" % (number // 2))) for number in range(80)]
    assert homes[::2] == homes[1::2]
    assert len(set(homes)) == 8


def test_a_few_blocks_do_not_make_a_prompt_known() -> None:
    """A common system prompt does not draw all conversations to where it was seen first."""
    router = PrefixAffinityRouting(cold_below=0.5).router()
    warm = [candidate("r0", device_tokens=100), *fleet()[1:]]
    homes = {chosen(router, warm, prefix(b"%d" % number)) for number in range(40)}
    assert len(homes) > 4


def test_warm_replica_wins_when_queues_are_equal() -> None:
    """The prefix is worth its prefill."""
    warm, cold = candidate("a", prefill_s=0.01), candidate("b", prefill_s=0.5)
    assert chosen(LeastTtftRouting().router(), [cold, warm]) == "a"


def test_a_queue_is_weighed_against_a_prefix() -> None:
    """A saturated holder loses its hot prefix to an idle replica, not before."""
    router = LeastTtftRouting(recompute_weight=0.5).router()
    cold = candidate("b", prefill_s=0.5)
    assert chosen(router, [candidate("a", prefill_s=0.01, queue_s=0.6), cold]) == "a"
    assert chosen(router, [candidate("a", prefill_s=0.01, queue_s=0.9), cold]) == "b"


@pytest.mark.parametrize(("held", "best"), [(900, "a"), (400, "b")])
def test_near_ties_go_to_who_holds_most_of_the_prompt(held: int, best: str) -> None:
    """Where computing is thought to cost next to nothing, as after a few noisy observations. A
    small common beginning draws nobody to where there is less room."""
    router = LeastTtftRouting().router()
    warm = candidate("a", prefill_s=0.1, device_tokens=held, running=3, kv_free=0.2)
    cold = candidate("b", prefill_s=0.1, kv_free=0.9)
    assert chosen(router, [cold, warm]) == best


def test_near_ties_go_to_where_more_kv_memory_is_free() -> None:
    """A few milliseconds are noise."""
    router = LeastTtftRouting().router()
    fuller = candidate("a", prefill_s=0.100, kv_free=0.2)
    freer = candidate("b", prefill_s=0.103, kv_free=0.9)
    decision = router.decide(ANY, [fuller, freer])
    assert decision.best.replica == "b"
    assert decision.reason == "equal times, more room"


def test_near_ties_go_to_the_lower_load_where_kv_memory_is_unknown() -> None:
    """One that does not say it is not taken to be free."""
    router = LeastTtftRouting().router()
    busy = candidate("a", running=5)
    idle = candidate("b", kv_free=0.1)
    assert chosen(router, [busy, idle]) == "b"


def test_a_replica_without_a_place_comes_last() -> None:
    """However short its queue looks."""
    router = LeastTtftRouting().router()
    full = candidate("a", prefill_s=0.01, running=100)
    assert chosen(router, [full, candidate("b", prefill_s=2.0)]) == "b"

"""The replay against a slow, obvious model; tiers stay whole; nothing beats the optimum."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, get_args

from hypothesis import given, settings
from hypothesis import strategies as st

from policies.access import Stop
from policies.admission import AlwaysAdmission, SecondUseAdmission, all_of
from policies.eviction import Eviction, LruEviction
from prefix_store.base import BlockHash
from prefix_store.simulation.grid import Cell, Foresight, TierPlan, replay_cell
from prefix_store.simulation.replay import Replay, ReplaySettings
from prefix_store.simulation.tier import SimulatedTier
from prefix_store.simulation.trace import Trace, TraceRequest

SETTINGS = ReplaySettings(warm_up=0.0, token_bytes=1)
KINDS: list[Any] = [kind() for kind in get_args(get_args(Eviction)[0])]


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Prompts that extend and branch off one another, in a few sessions."""
    prompts = [""]
    requests: list[TraceRequest] = []
    time_s = 0.0
    for _ in range(draw(st.integers(1, 25))):
        prompt = draw(st.sampled_from(prompts))
        cut = draw(st.integers(0, len(prompt)))
        prompt = prompt[:cut] + draw(st.text("ab", min_size=1, max_size=4))
        prompts.append(prompt)
        time_s += draw(st.integers(0, 3))
        chain = [BlockHash(prompt[: i + 1].encode()) for i in range(len(prompt))]
        requests.append(
            TraceRequest(
                time_s=time_s, answer_s=draw(st.integers(0, 4)), input_tokens=len(chain),
                output_tokens=1, block_size=1, chain=chain, session=draw(st.sampled_from("st")),
                stop=draw(st.sampled_from(list(Stop))),
            )
        )  # fmt: skip
    return Trace("t", requests, sum(len(r.chain) for r in requests), 0)


def lru_hits(trace: Trace, capacity: int) -> int:
    """One list of resident blocks with the number of their last use, searched from end to end."""
    last_use: dict[bytes, int] = {}
    hits = 0
    for number, request in enumerate(trace.requests):
        run = []
        for name in request.chain:
            if name not in last_use:
                break
            run.append(name)
        hits += len(run)
        last_use.update(dict.fromkeys(run, number))
        for name in request.chain[len(run) :]:
            if len(last_use) == capacity:
                leaves = [
                    b for b in last_use
                    if not any(o != b and o.startswith(b) for o in last_use)
                    and not request.chain[-1].startswith(b)
                ]  # fmt: skip
                if not leaves:
                    break
                del last_use[min(leaves, key=lambda b: (last_use[b], -len(b)))]
            last_use[name] = number
    return hits


@given(traces(), st.integers(1, 12))
@settings(max_examples=150, deadline=None)
def test_lru_equals_the_obvious_model(trace: Trace, capacity: int) -> None:
    """Hit for hit."""
    cell = Cell("lru", (TierPlan("memory", capacity, LruEviction()),))
    report = replay_cell(cell, trace, SETTINGS, lambda _: None)
    assert report.hit_tokens == lru_hits(trace, capacity)


def assert_whole(tiers: Sequence[SimulatedTier]) -> None:
    for tier in tiers:
        nodes = list(tier.index.nodes())
        assert tier.used_bytes == sum(node.num_bytes for node in nodes) <= tier.capacity_bytes
        for node in nodes:
            assert node.leases == 0
            assert node.parent is None or tier.index.get(node.parent.hash) is node.parent


@given(
    traces(), st.sampled_from(KINDS), st.lists(st.integers(1, 9), min_size=1, max_size=3),
    st.booleans(), st.booleans(),
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_every_tier_is_within_its_capacity_and_closed_under_prefixes(
    trace: Trace, kind: Any, capacities: list[int], on_save: bool, picky: bool
) -> None:
    """After every request, whatever moves between tiers."""
    tiers: list[SimulatedTier] = []
    for number, capacity in enumerate(capacities):
        rule = SecondUseAdmission() if picky and number == 0 else AlwaysAdmission()
        tiers.insert(
            0,
            SimulatedTier(
                str(number), capacity, kind, gate=all_of([rule]), write_on_save=on_save,
                below=tiers[0] if tiers else None,
            ),
        )  # fmt: skip
    replay = Replay(tiers, SETTINGS)
    for number, request in enumerate(trace.requests):
        replay.step(number, request)
        assert_whole(tiers)


def hits_of(trace: Trace, capacity: int, evictions: Sequence[Any]) -> Iterator[int]:
    for eviction in evictions:
        cell = Cell("p", (TierPlan("memory", capacity, eviction),))
        yield replay_cell(cell, trace, SETTINGS, lambda _: None).hit_tokens


@given(traces(), st.integers(1, 12))
@settings(max_examples=100, deadline=None)
def test_nothing_beats_the_optimum(trace: Trace, capacity: int) -> None:
    """Neither any kind nor foresight that has to let everything in."""
    (best,) = hits_of(trace, capacity, [Foresight.OPTIMUM])
    assert max(hits_of(trace, capacity, [*KINDS, Foresight.BELADY])) <= best

"""The replay: what counts as a hit, when policies learn what, how blocks move between tiers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from policies.access import Access, Stop
from policies.admission import NeverAdmission, SecondUseAdmission
from policies.eviction import EvictionQueue, LruEviction
from policies.eviction.lru import LruQueue
from prefix_store.base import BlockHash
from prefix_store.simulation.grid import Cell, Foresight, TierPlan, replay_cell
from prefix_store.simulation.replay import ReplaySettings
from prefix_store.simulation.report import ReplayReport
from prefix_store.simulation.trace import Trace, TraceRequest

SIZE = 10
SETTINGS = ReplaySettings(warm_up=0.0, token_bytes=1)


def request_of(text: str, time_s: float = 0.0, **more: Any) -> TraceRequest:
    """One block for each prefix of `text`."""
    chain = [BlockHash(text[: i + 1].encode()) for i in range(len(text))]
    return TraceRequest(
        time_s=time_s, answer_s=more.pop("answer_s", 0.0), input_tokens=len(text) * SIZE,
        output_tokens=5, block_size=SIZE, chain=chain, **more,
    )  # fmt: skip


def trace_of(requests: Sequence[TraceRequest]) -> Trace:
    return Trace("t", list(requests), sum(len(r.chain) for r in requests), 0)


def memory(num_blocks: int, eviction: Any = None, **more: Any) -> TierPlan:
    return TierPlan("memory", num_blocks * SIZE, eviction or LruEviction(), **more)


def below(num_blocks: int, name: str = "disk", **more: Any) -> TierPlan:
    return TierPlan(name, num_blocks * SIZE, LruEviction(), **more)


def replayed(
    tiers: Sequence[TierPlan], *texts: str, settings: ReplaySettings = SETTINGS
) -> ReplayReport:
    requests = [request_of(text, float(i)) for i, text in enumerate(texts)]
    return replay_cell(Cell("p", tuple(tiers)), trace_of(requests), settings, lambda _: None)


def hit_blocks(report: ReplayReport) -> int:
    return report.hit_tokens // SIZE


def test_only_the_leading_run_counts() -> None:
    """`abX` finds `ab`; `Xbc` shares text with others but no prefix."""
    report = replayed([memory(100)], "abc", "abX", "Xbc")
    assert hit_blocks(report) == 2
    assert (report.requests, report.hit_requests) == (3, 1)
    assert report.input_tokens == 90


def test_a_full_tier_evicts_tails_of_the_least_recent_prompt() -> None:
    """Heads stay useful: of `abc` the tail went, `ab` still hits."""
    report = replayed([memory(4)], "abc", "xy", "abc")
    assert hit_blocks(report) == 2
    assert report.evicted_blocks == 2  # c for y, then y for c


def test_a_prompt_larger_than_the_tier_keeps_its_head() -> None:
    """Its own blocks are leased while it comes in."""
    report = replayed([memory(3)], "abcde", "abcde")
    assert hit_blocks(report) == 3
    assert report.tiers[0].used_bytes == 3 * SIZE
    assert report.tiers[0].refused_blocks == 4
    assert report.evicted_blocks == 0


def test_warm_up_fills_and_is_not_counted() -> None:
    """The first half only makes the second half's hits possible."""
    half = ReplaySettings(warm_up=0.5, token_bytes=1)
    report = replayed([memory(100)], "ab", "ab", settings=half)
    assert (report.requests, report.token_hit_rate, report.request_hit_rate) == (1, 1.0, 1.0)
    assert report.tiers[0].written_bytes == 0


def test_saved_time_follows_the_prefill_curve() -> None:
    """Saved: what cold prefill takes, less what the rest takes after the reused tokens."""
    report = replayed([memory(100)], "ab", "abcd")
    prefill = SETTINGS.prefill
    assert report.prefill_s == pytest.approx(prefill.seconds(0, 20) + prefill.seconds(0, 40))
    assert report.saved_s == pytest.approx(prefill.seconds(0, 40) - prefill.seconds(20, 20))


class SpyQueue(LruQueue[Any]):
    """Notes what it is told."""

    def __init__(self, told: list[tuple[float, str, Stop, int]], *, refuse: bytes) -> None:
        super().__init__()
        self.told = told
        self.refuse = refuse

    def add(self, block: Any) -> None:
        access: Access = block.access
        self.told.append((access.time_s, block.hash.decode(), access.stop, access.turn))
        super().add(block)

    def admits(self, block: Any, now: float) -> bool:
        return block.hash != self.refuse


@dataclass(frozen=True)
class SpyEviction:
    """Makes spies that write into one list."""

    told: list[tuple[float, str, Stop, int]]
    refuse: bytes = b""

    def queue(self) -> EvictionQueue[Any]:
        return SpyQueue(self.told, refuse=self.refuse)


def test_policies_learn_how_an_answer_ended_when_it_has_ended() -> None:
    """Not before: a request that comes meanwhile finds the outcome unknown."""
    told: list[tuple[float, str, Stop, int]] = []
    requests = [
        request_of("ab", 0.0, answer_s=2.0, stop=Stop.TOOL_USE, session="s"),
        request_of("x", 1.0),
        request_of("y", 2.0, session="s"),
    ]
    cell = Cell("p", (memory(9, SpyEviction(told)),))
    replay_cell(cell, trace_of(requests), SETTINGS, lambda _: None)
    outcome = (0.0, "ab", Stop.TOOL_USE, 0)
    assert told.count(outcome) == 1
    assert all(time_s < 2.0 for time_s, *_ in told[: told.index(outcome)])
    assert (1.0, "x", Stop.UNKNOWN, 0) in told[: told.index(outcome)]
    assert (2.0, "y", Stop.UNKNOWN, 1) in told, "the session's second turn"


def test_outcome_reaches_the_deepest_block_that_is_left() -> None:
    """The tail may have gone while the answer ran."""
    told: list[tuple[float, str, Stop, int]] = []
    requests = [request_of("abc", 0.0, answer_s=5.0, stop=Stop.END_TURN), request_of("x", 1.0),
                request_of("x", 9.0)]  # fmt: skip
    cell = Cell("p", (memory(3, SpyEviction(told)),))
    replay_cell(cell, trace_of(requests), SETTINGS, lambda _: None)
    assert (0.0, "ab", Stop.END_TURN, 0) in told


def test_block_that_the_policy_refuses_ends_its_run() -> None:
    """Tiers stay closed under prefixes."""
    eviction = SpyEviction([], refuse=b"xy")
    report = replayed([memory(3, eviction)], "abc", "xyz", "xyz")
    assert hit_blocks(report) == 1
    assert report.tiers[0].refused_blocks == 4


def test_gate_of_memory_lets_blocks_in_at_their_second_use() -> None:
    """So only the third request hits."""
    report = replayed([memory(9, admission=(SecondUseAdmission(),))], "ab", "ab", "ab")
    assert hit_blocks(report) == 2


def test_evicted_blocks_go_down_with_their_ancestors_and_come_up_again() -> None:
    """`abc` loses c to disk, which needs a and b too; then c is read from there."""
    report = replayed([memory(3), below(9)], "abc", "x", "abc")
    disk = report.tiers[1]
    assert hit_blocks(report) == 3
    assert report.tiers[0].hit_tokens == 2 * SIZE
    assert disk.hit_tokens == SIZE
    assert disk.read_bytes == SIZE
    assert disk.written_bytes == 4 * SIZE  # a, b, c as c went; x as it made room for c
    assert report.moved_bytes == 5 * SIZE


def test_blocks_that_disk_evicts_go_to_redis() -> None:
    """Down the whole hierarchy, and up again from there."""
    report = replayed([memory(1), below(1), below(9, "redis")], "a", "b", "c", "a")
    assert hit_blocks(report) == 1
    assert report.tiers[2].hit_tokens == SIZE


def test_tier_written_on_save_has_blocks_before_memory_evicts_them() -> None:
    """What is written early need not be written at eviction."""
    tiers = [memory(9), below(9, write_on_save=True)]
    report = replayed(tiers, "ab")
    assert report.tiers[1].written_bytes == 2 * SIZE
    assert report.evicted_blocks == 0


def test_admission_below_keeps_blocks_out() -> None:
    """`never` on disk: nothing is written, nothing hits there."""
    tiers = [memory(1), below(9, admission=(NeverAdmission(),))]
    report = replayed(tiers, "a", "b", "a")
    assert hit_blocks(report) == 0
    assert report.tiers[1].written_bytes == 0
    assert report.tiers[1].refused_blocks == 2


def test_nothing_is_loaded_where_loading_says_never() -> None:
    """Blocks below memory are no use then."""
    settings = ReplaySettings(warm_up=0.0, token_bytes=1, load=False)
    report = replayed([memory(1), below(9)], "a", "b", "a", settings=settings)
    assert hit_blocks(report) == 0


def test_optimum_keeps_what_is_needed_soonest_and_may_refuse() -> None:
    """LRU has no hit on a loop that is larger than the tier; the optimum keeps part of it."""
    loop = ["a", "b", "c"] * 4
    assert hit_blocks(replayed([memory(2)], *loop)) == 0
    assert hit_blocks(replayed([memory(2, Foresight.BELADY)], *loop)) == 5
    assert hit_blocks(replayed([memory(2, Foresight.OPTIMUM)], *loop)) == 6

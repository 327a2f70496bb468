"""The scheduler of the simulated engine: order, budgets, reuse, preemption, and its shortcut."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_adapter.simulated.events import EventLog
from engine_adapter.simulated.limits import SchedulerLimits
from engine_adapter.simulated.scheduler import Scheduler
from engine_adapter.simulated.sequence import Job, Sequence
from engine_adapter.simulated.timing import StepTiming
from prefix_store.events import AllBlocksCleared, BlockRemoved, BlockStored, ExternalHash
from prefix_store.hashing import as_token_ids

BLOCK = 4
A_SECOND_A_STEP = StepTiming(1.0, 0.0, 0.0, 0.0, 0.0)
TIMING = StepTiming(0.5, 0.01, 0.0001, 0.02, 0.0003)
LIMITS = SchedulerLimits(
    num_blocks=64, block_size=BLOCK, max_batched_tokens=16, max_sequences=8, together_s=1e9
)


def job(first: int, prompt: int, answer: int, **fields: Any) -> Job:
    """A prompt of counted token ids, and an answer of others."""
    return Job(
        as_token_ids(range(first, first + prompt)),
        as_token_ids(range(first + 10_000, first + 10_000 + answer)),
        **fields,
    )


@dataclass
class Engine:
    """A scheduler, and what its events say."""

    limits: SchedulerLimits = LIMITS
    timing: StepTiming = A_SECOND_A_STEP
    copies: Counter[ExternalHash] = field(default_factory=Counter)
    stored: list[BlockStored] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.log = EventLog(BLOCK, enabled=True)
        self.scheduler = Scheduler(self.limits, self.timing, self.log)

    def add(self, job: Job, now: float = 0.0) -> Sequence:
        return self.scheduler.add(job, now)

    def run(self) -> float:
        """To the end of everything; the time."""
        now = 0.0
        while self.scheduler.due_at is not None:
            now = self.scheduler.due_at
            self.scheduler.advance(now)
            self.follow()
        return now

    def follow(self) -> None:
        """Apply the events."""
        for event in self.log.take():
            if isinstance(event, BlockStored):
                self.stored.append(event)
                self.copies.update(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                self.copies.subtract(event.block_hashes)
                assert min(self.copies.values()) >= 0
            else:
                assert isinstance(event, AllBlocksCleared)
                self.copies.clear()

    @property
    def resident(self) -> set[ExternalHash]:
        return {block_hash for block_hash, count in self.copies.items() if count}


def test_a_prompt_is_computed_in_chunks_and_its_answer_token_by_token() -> None:
    """40 tokens at 16 a step are 3 steps, the last of which gives the first token."""
    engine = Engine()
    sequence = engine.add(job(0, 40, 5))
    assert engine.run() == 7.0
    assert (sequence.scheduled_at, sequence.first_token_at, sequence.finished_at) == (0, 3, 7)
    assert [event.token_ids for event in engine.stored] == [
        list(range(16)), list(range(16, 32)), list(range(32, 40)), list(range(10_000, 10_004)),
    ]  # fmt: skip


def test_running_sequences_come_first_and_the_rest_of_the_budget_is_for_waiting_ones() -> None:
    """15 tokens of the second prompt fit beside the first one's token."""
    engine = Engine()
    first = engine.add(job(0, 16, 3))
    second = engine.add(job(100, 30, 1))
    engine.scheduler.advance(1.0)
    assert (first.num_generated, second.num_computed) == (1, 0)
    engine.scheduler.advance(2.0)
    assert (first.num_generated, second.num_computed) == (2, 15)
    engine.run()
    assert (first.finished_at, second.finished_at) == (3, 3)


def test_no_more_sequences_run_than_allowed() -> None:
    """The next one is admitted when one ends."""
    engine = Engine(replace(LIMITS, max_sequences=1))
    engine.add(job(0, 4, 3))
    second = engine.add(job(100, 4, 1))
    assert (engine.scheduler.num_running, engine.scheduler.num_waiting) == (1, 1)
    engine.run()
    assert (second.scheduled_at, second.finished_at) == (3, 4)


def test_priority_decides_where_the_engine_schedules_by_it() -> None:
    """Lower first; equal ones by arrival."""
    for by_priority, order in ((False, [0, 1, 2]), (True, [2, 0, 1])):
        engine = Engine(replace(LIMITS, max_sequences=1, by_priority=by_priority))
        engine.add(job(0, 4, 1))
        waiting = [engine.add(job(100 * i, 4, 1, priority=p)) for i, p in ((1, 5), (2, 5), (3, 1))]
        engine.run()
        assert sorted(range(3), key=lambda i: waiting[i].scheduled_at or 0.0) == order


def test_a_prefix_is_found_from_the_moment_on_when_it_is_scheduled() -> None:
    """A sequence admitted in the same step reuses what the one before it will have computed."""
    engine = Engine(replace(LIMITS, max_batched_tokens=100))
    engine.add(job(500, 4, 1))
    first, second = engine.add(job(0, 12, 1)), engine.add(job(0, 15, 1))
    engine.run()
    assert (first.cached_tokens, second.cached_tokens) == (0, 12)
    assert first.first_token_at == second.first_token_at == 2


def test_the_last_token_is_computed_always() -> None:
    """A prompt that is cached as a whole computes its last block again, and that is a copy."""
    engine = Engine()
    for expected in (0, 4, 4):
        sequence = engine.add(job(0, 8, 1), engine.run())
        engine.run()
        assert sequence.cached_tokens == expected
    assert sorted(engine.copies.values()) == [1, 3]


def test_salt_and_adapter_separate_and_are_announced() -> None:
    """The salt in the first block's extra keys only, the adapter in all of them, before it."""
    engine = Engine()
    kinds = [{}, {"salt": "s"}, {"adapter": "a", "adapter_number": 1},
             {"adapter": "a", "adapter_number": 1, "salt": "s"}]  # fmt: skip
    for kind in kinds:
        sequence = engine.add(job(0, 10, 1, **kind), engine.run())
        engine.run()
        assert sequence.cached_tokens == 0
    keys = [event.extra_keys for event in engine.stored]
    assert keys == [[None, None], [["s"], None], [["a"], ["a"]], [["a", "s"], ["a"]]]
    assert [event.lora_name for event in engine.stored] == [None, None, "a", "a"]
    assert len(engine.resident) == 8


def test_reused_blocks_are_announced_again_where_it_is_asked_for() -> None:
    """And the new ones below them."""
    engine = Engine()
    engine.add(job(0, 10, 1))
    engine.add(job(0, 14, 1, reports_reused=True), engine.run())
    engine.run()
    old, reused, new = engine.stored
    assert reused == old
    assert new.parent_block_hash == reused.block_hashes[-1]
    assert new.token_ids == [8, 9, 10, 11]


def test_a_sequence_waits_until_all_of_it_fits() -> None:
    """Not only its first chunk; nobody overtakes it."""
    engine = Engine(replace(LIMITS, num_blocks=10))
    engine.add(job(0, 20, 2))
    large, small = engine.add(job(100, 24, 1)), engine.add(job(200, 4, 1))
    engine.run()
    assert large.scheduled_at == 3  # 2 chunks and one more token
    assert small.scheduled_at == 4  # the first chunk took all of a step


def test_the_last_one_gives_way_when_blocks_run_out() -> None:
    """It is computed again, and what was cached of it at first is what counts."""
    engine = Engine(replace(LIMITS, num_blocks=6))
    first, second = engine.add(job(0, 8, 12)), engine.add(job(100, 8, 8))
    engine.run()
    assert (first.preemptions, second.preemptions) == (0, 1)
    assert second.cached_tokens == 0
    assert second.num_generated == 8
    assert engine.scheduler.counters.preemptions == 1
    assert first.finished_at is not None
    assert second.finished_at is not None
    assert first.finished_at < second.finished_at
    assert engine.scheduler.counters.hit_tokens == 0


def test_who_gives_way_by_priority_costs_nobody_a_step() -> None:
    """The least important one goes although it has its token already, and all others get theirs."""
    engine = Engine(replace(LIMITS, num_blocks=7, by_priority=True))
    first = engine.add(job(0, 9, 5, priority=9))
    second, third = engine.add(job(100, 12, 5, priority=1)), engine.add(job(200, 4, 5, priority=1))
    engine.scheduler.advance(2.0)
    assert [each.num_generated for each in (first, second, third)] == [2, 1, 0]
    engine.scheduler.advance(3.0)
    assert first.preemptions == 1
    assert [each.num_generated for each in (first, second, third)] == [2, 2, 1]
    engine.run()
    assert first.num_generated == 5


def test_room_that_is_made_is_used_at_once() -> None:
    """Where the first of all gives way itself, the others go on without it."""
    engine = Engine(replace(LIMITS, num_blocks=7, by_priority=True))
    first = engine.add(job(0, 12, 9, priority=9))
    second = engine.add(job(100, 9, 7, priority=1))
    engine.run()
    assert (first.preemptions, second.preemptions) == (1, 0)
    assert (first.num_generated, second.num_generated) == (9, 7)
    assert second.finished_at == 8  # a token a step since it was admitted


def test_abort_frees_at_once() -> None:
    """Running or waiting; what was computed may be found by others."""
    engine = Engine(replace(LIMITS, max_sequences=1))
    first, second = engine.add(job(0, 8, 50)), engine.add(job(100, 4, 50))
    engine.scheduler.abort(second, 1.5)
    assert engine.scheduler.num_waiting == 0
    engine.scheduler.abort(first, 2.5)
    assert (engine.scheduler.num_running, engine.scheduler.kv_usage) == (0, 0.0)
    assert engine.run() == 3.0
    engine.scheduler.abort(first, 4.0)
    assert engine.scheduler.counters.aborted == 2
    third = engine.add(job(0, 9, 1), 5.0)
    engine.run()
    assert third.cached_tokens == 8


def test_wire_tokens_stand_for_several() -> None:
    """In time, in memory and in blocks; the first is out with the first token of the model."""
    engine = Engine(replace(LIMITS, tokens_per_wire_token=4, num_blocks=16))
    seen: list[tuple[int, float]] = []
    sequence = engine.add(job(0, 10, 2, streams=True))
    sequence.progressed = lambda each, now: seen.append((each.wire_tokens, now))
    assert engine.scheduler.kv_usage == pytest.approx(1 / 16)  # a block is 16 tokens
    engine.run()
    assert seen == [(1, 3.0), (2, 7.0), (2, 10.0)]
    again = engine.add(job(0, 10, 2), 20.0)
    engine.run()
    assert again.cached_tokens == 8


def test_slow_engines_are_slow_from_the_next_step_on() -> None:
    """And well again later."""
    engine = Engine()
    sequence = engine.add(job(0, 4, 3, streams=True))
    engine.scheduler.slow_down(3.0)
    engine.scheduler.advance(1.0)
    engine.scheduler.slow_down(1.0)
    assert engine.run() == 5.0
    assert sequence.first_token_at == 1.0


def test_a_reset_is_told_and_waits_for_what_runs() -> None:
    """As vLLM refuses it meanwhile."""
    engine = Engine()
    engine.add(job(0, 8, 1))
    assert not engine.scheduler.reset_cache()
    now = engine.run()
    assert len(engine.resident) == 2
    assert engine.scheduler.reset_cache()
    engine.follow()
    assert engine.resident == set()
    sequence = engine.add(job(0, 8, 1), now)
    engine.run()
    assert sequence.cached_tokens == 0


@dataclass(frozen=True)
class Arrival:
    """A request in a random history."""

    at: float
    first: int
    prompt: int
    answer: int
    streams: bool
    patience: float
    """It is aborted after so long."""


arrivals = st.lists(
    st.builds(
        Arrival,
        at=st.floats(0, 60),
        first=st.sampled_from([0, 0, 0, 8, 500]),
        prompt=st.integers(1, 40),
        answer=st.integers(1, 24),
        streams=st.booleans(),
        patience=st.one_of(st.just(1e6), st.floats(0, 30)),
    ),
    min_size=1,
    max_size=12,
)


def replay(engine: Engine, history: list[Arrival], *, all_stream: bool = False) -> list[Sequence]:
    """Requests and aborts in the order of their times."""
    moments: list[tuple[float, int, Arrival, bool]] = []
    for i, arrival in enumerate(history):
        moments += [(arrival.at, i, arrival, True)]
        moments += [(arrival.at + arrival.patience, i, arrival, False)]
    sequences: dict[int, Sequence] = {}
    for now, i, arrival, comes in sorted(moments, key=lambda moment: moment[:2]):
        if comes:
            streams = arrival.streams or all_stream
            wanted = job(arrival.first, arrival.prompt, arrival.answer, streams=streams)
            sequences[i] = engine.add(wanted, now)
        else:
            engine.scheduler.abort(sequences[i], now)
        engine.follow()
    engine.run()
    return [sequences[i] for i in range(len(history))]


@given(arrivals, st.integers(16, 40), st.booleans(), st.sampled_from([1, 3]))
def test_histories_end_well(
    history: list[Arrival], num_blocks: int, by_priority: bool, scale: int
) -> None:
    """Whatever arrives and leaves: all that stays is answered in full, nothing is held at the end,
    and the events say which blocks can be found."""
    limits = replace(
        LIMITS, num_blocks=num_blocks, max_sequences=3, by_priority=by_priority,
        tokens_per_wire_token=scale,
    )  # fmt: skip
    engine = Engine(limits, TIMING)
    for sequence, arrival in zip(replay(engine, history), history, strict=True):
        assert sequence.finished_at is not None
        if arrival.patience > 1e5:
            assert sequence.wire_tokens == arrival.answer
        if sequence.cached_tokens is not None:
            assert sequence.cached_tokens % BLOCK == 0
            assert sequence.cached_tokens < arrival.prompt
        if sequence.first_token_at is not None and sequence.scheduled_at is not None:
            assert sequence.arrived_at <= sequence.scheduled_at < sequence.first_token_at
    scheduler = engine.scheduler
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.kv_usage) == (0, 0, 0.0)
    assert sum(engine.copies.values()) <= num_blocks
    for first in (0, 8, 500):
        probe = Sequence.of(job(first, 60, 1), arrived_at=0, number=0, scale=1, block_size=BLOCK)
        told = next(
            (i for i, block_hash in enumerate(probe.hashes) if block_hash not in engine.resident),
            len(probe.hashes),
        )
        assert scheduler.find(probe.hashes) == told


@given(arrivals)
def test_planning_steps_together_changes_nothing(history: list[Arrival]) -> None:
    """Streams that want every token make the scheduler go step by step; the times are the same."""
    limits = replace(LIMITS, num_blocks=400)
    together = replay(Engine(limits, TIMING), history)
    one_by_one = replay(Engine(limits, TIMING), history, all_stream=True)
    for one, other in zip(together, one_by_one, strict=True):
        assert one.finished_at == pytest.approx(other.finished_at)
        assert one.cached_tokens == other.cached_tokens
        if one.num_remaining == 0:
            assert one.first_token_at == pytest.approx(other.first_token_at)

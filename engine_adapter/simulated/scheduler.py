"""The scheduler of a simulated engine (engine_adapter.simulated). Pure: time is an argument.

Follows vLLM's V1 scheduler (vllm/v1/core/sched/scheduler.py, 0.32): one budget of tokens a step;
running sequences first, in the order in which they were admitted; then waiting ones, whose prompts
are cut into chunks; a sequence is admitted when all of its tokens fit; when blocks run out, the
sequence that was admitted last gives its blocks back and is computed again later.

One thing is a shortcut: steps that only decode, and of which nobody can tell one from the next, are
planned together and cut when something arrives.
"""

from __future__ import annotations

import bisect

from engine_adapter.simulated.cache import Block, BlockCache
from engine_adapter.simulated.events import EventLog
from engine_adapter.simulated.limits import SchedulerCounters, SchedulerLimits
from engine_adapter.simulated.sequence import Job, Sequence
from engine_adapter.simulated.step import Share, Step
from engine_adapter.simulated.timing import StepTiming
from prefix_store.base import BlockHash


class Scheduler:
    """One engine's queue, batch and cache."""

    def __init__(self, limits: SchedulerLimits, timing: StepTiming, log: EventLog) -> None:
        self._limits = limits
        self._normal_timing = timing
        self._timing = timing
        self._log = log
        self._cache = BlockCache(limits.num_blocks, log.removed)
        self._block_tokens = limits.block_size * limits.tokens_per_wire_token
        self._running: list[Sequence] = []
        self._waiting: list[Sequence] = []
        self._step: Step | None = None
        self._arrivals = 0
        self.counters = SchedulerCounters()

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def kv_usage(self) -> float:
        """Share of the blocks that running sequences use."""
        return self._cache.usage

    @property
    def kv_tokens(self) -> int:
        """That its blocks hold; tokens on the wire."""
        return self._limits.num_blocks * self._limits.block_size

    @property
    def kv_blocks(self) -> int:
        """Its blocks."""
        return self._limits.num_blocks

    @property
    def due_at(self) -> float | None:
        """When the running step ends; None when there is nothing to do."""
        return None if self._step is None else self._step.end

    def scheduled(self) -> list[tuple[Sequence, int]]:
        """What the running step computes: sequences and their tokens."""
        shares = self._step.shares if self._step is not None else []
        return [(share.sequence, share.num_tokens) for share in shares]

    def add(self, job: Job, now: float) -> Sequence:
        """A request has arrived."""
        self.advance(now)
        limits = self._limits
        self._arrivals += 1
        sequence = Sequence.of(
            job,
            arrived_at=now,
            number=self._arrivals,
            scale=limits.tokens_per_wire_token,
            block_size=limits.block_size,
        )
        bisect.insort(self._waiting, sequence, key=self._turn)
        if self._step is None:
            self._step = self._plan(now)
        elif len(self._running) < limits.max_sequences:
            self._step.cut(self._timing, now)
        return sequence

    def abort(self, sequence: Sequence, now: float) -> None:
        """Nobody wants the answer any more. Does nothing when it is complete."""
        self.advance(now)
        if sequence.is_finished:
            return
        sequence.finished_at = now
        self.counters.aborted += 1
        if sequence in self._waiting:
            self._waiting.remove(sequence)
            return
        self._running.remove(sequence)
        if self._step is not None:
            self._step.cut(self._timing, now)
            for share in self._step.shares:
                if share.sequence is sequence:  # what is computed for it can be found
                    computed = share.num_tokens * self._step.steps
                    self._name(sequence, sequence.num_computed + computed)
        self._free(sequence)

    def advance(self, now: float) -> None:
        """Do everything that is over by now."""
        while self._step is not None and self._step.end <= now:
            step = self._step
            self._step = None
            self._finish(step)
            self._step = self._plan(step.end)

    def find(self, hashes: list[BlockHash]) -> int:
        """Blocks of this run that a request would reuse."""
        return len(self._cache.find(hashes, len(hashes)))

    def reset_cache(self) -> bool:
        """Forget all blocks; False while any are in use."""
        if not self._cache.reset():
            return False
        self._log.cleared()
        return True

    def slow_down(self, factor: float) -> None:
        """From the next step on, steps take `factor` times as long as at first."""
        self._timing = self._normal_timing.scaled(factor)

    def _turn(self, sequence: Sequence) -> tuple[int, int]:
        """Place in the queue: one that was preempted arrived before all that wait."""
        return (sequence.job.priority if self._limits.by_priority else 0, sequence.number)

    def _plan(self, now: float) -> Step | None:
        """What is computed next; None when there is nothing."""
        while self._running or self._waiting:
            step = Step(start=now)
            budget, preempted = self._plan_running(step, self._limits.max_batched_tokens)
            if not preempted:
                self._plan_waiting(step, budget, now)
            if step.shares:
                self._extend(step)
                return step
            # Who gave way was the first of all: now there is room for others.
        return None

    def _extend(self, step: Step) -> None:
        """To a row of steps, where they only decode; and its end."""
        if step.decodes_only:
            step.steps = self._steps_together(step)
            for share in step.shares:
                self._cover(share.sequence, step.steps)
        step.end = step.start + self._timing.steps_s(step.work, step.steps)

    def _plan_running(self, step: Step, budget: int) -> tuple[int, bool]:
        """The budget that is left, and whether anybody had to give way."""
        position, preempted = 0, False
        while position < len(self._running) and budget > 0:
            sequence = self._running[position]
            count = min(sequence.num_tokens - sequence.num_computed, budget)
            while self._lacking(sequence, count) > self._cache.num_free:
                victim = self._victim()
                position -= self._running.index(victim) < position
                budget += self._preempt(victim, step)
                preempted = True
                if victim is sequence:
                    return budget, preempted
            self._give(step, sequence, count)
            budget -= count
            position += 1
        return budget, preempted

    def _victim(self) -> Sequence:
        """Who gives way: who was admitted last, or by priority who would be."""
        if self._limits.by_priority:
            return max(self._running, key=self._turn)
        return self._running[-1]

    def _plan_waiting(self, step: Step, budget: int, now: float) -> None:
        while self._waiting and budget > 0 and len(self._running) < self._limits.max_sequences:
            sequence = self._waiting[0]
            most = (sequence.num_tokens - 1) // self._block_tokens
            reused = self._cache.find(sequence.hashes, most)
            if sequence.job.reports_reused:  # as in vLLM, at every look, admitted or not
                self._log.stored(sequence, 0, len(reused))
            unused = sum(1 for block in reused if block.users == 0)
            total = -(-sequence.num_tokens // self._block_tokens)
            if total - len(reused) + unused > self._cache.num_free:
                return
            del self._waiting[0]
            self._admit(sequence, reused, now)
            count = min(sequence.num_tokens - sequence.num_computed, budget)
            self._give(step, sequence, count)
            budget -= count

    def _admit(self, sequence: Sequence, reused: list[Block], now: float) -> None:
        wire_tokens = len(reused) * self._limits.block_size
        self._cache.use(reused)
        sequence.blocks = reused
        sequence.num_named = len(reused)
        sequence.num_computed = len(reused) * self._block_tokens
        if sequence.cached_tokens is None:
            sequence.cached_tokens = wire_tokens
            sequence.scheduled_at = now
            self.counters.queried_tokens += sequence.job.prompt.size
            self.counters.prompt_tokens += sequence.job.prompt.size
            self.counters.hit_tokens += wire_tokens
        self._running.append(sequence)

    def _give(self, step: Step, sequence: Sequence, count: int) -> None:
        """`count` tokens of the step; the blocks for one step are taken at once, so that the next
        sequence sees what is left."""
        step.shares.append(Share(sequence, count))
        if count == 1 and sequence.num_generated:
            step.work.add_decode(sequence.num_computed)
        else:
            step.work.add_prefill(sequence.num_computed, count)
        self._cover(sequence, count)
        # As in vLLM, others find a block from the moment on when its last token is scheduled.
        self._name(sequence, sequence.num_computed + count)

    def _steps_together(self, step: Step) -> int:
        """How many steps nobody can tell apart: no answer is complete, no stream waits longer than
        it should, and there are blocks."""
        streams = False
        steps = step.shares[0].sequence.num_remaining
        for share in step.shares:
            sequence = share.sequence
            steps = min(steps, sequence.num_remaining)
            if sequence.job.streams:
                streams = True
                if self._limits.chunk_s == 0.0:
                    steps = min(steps, sequence.steps_to_next_wire_token)
        row_s = self._limits.together_s
        if streams and self._limits.chunk_s > 0.0:
            row_s = min(row_s, self._limits.chunk_s)
        steps = min(steps, self._timing.steps_within(step.work, row_s))
        if steps > 1 and not self._has_room(step, steps):
            return 1
        return steps

    def _has_room(self, step: Step, steps: int) -> bool:
        lacking = sum(self._lacking(share.sequence, steps) for share in step.shares)
        return lacking <= self._cache.num_free

    def _lacking(self, sequence: Sequence, count: int) -> int:
        """Blocks that `count` more tokens need."""
        needed = -(-(sequence.num_computed + count) // self._block_tokens)
        return max(0, needed - len(sequence.blocks))

    def _cover(self, sequence: Sequence, count: int) -> None:
        lacking = self._lacking(sequence, count)
        if lacking:
            sequence.blocks += self._cache.take(lacking)

    def _name(self, sequence: Sequence, num_tokens: int) -> None:
        """The blocks up to here are full."""
        first, end = sequence.num_named, min(num_tokens // self._block_tokens, len(sequence.hashes))
        if first >= end:
            return
        for position in range(first, end):
            self._cache.name(sequence.blocks[position], sequence.hashes[position])
        sequence.num_named = end
        self._log.stored(sequence, first, end)

    def _finish(self, step: Step) -> None:
        self.counters.busy_s += step.end - step.start
        for share in step.shares:
            sequence = share.sequence
            if not sequence.is_finished:
                self._grow(sequence, share.num_tokens * step.steps, step)

    def _grow(self, sequence: Sequence, count: int, step: Step) -> None:
        sequence.num_computed += count
        self._name(sequence, sequence.num_computed)
        if sequence.num_computed < sequence.num_tokens:
            return  # more of the prompt is to come
        before = sequence.wire_tokens
        sequence.num_generated += sequence.num_computed - sequence.num_tokens + 1
        self.counters.generated_tokens += sequence.wire_tokens - before
        if sequence.first_token_at is None:
            sequence.first_token_at = step.end
        if sequence.num_remaining <= 0:
            sequence.finished_at = step.end
            self.counters.finished += 1
            self._running.remove(sequence)
            self._free(sequence)
        sequence.progressed(sequence, step.end)

    def _preempt(self, sequence: Sequence, step: Step) -> int:
        """Back to the queue; the tokens of the step that it had are free again."""
        self._running.remove(sequence)
        self._free(sequence)
        sequence.num_computed = 0
        sequence.preemptions += 1
        self.counters.preemptions += 1
        bisect.insort(self._waiting, sequence, key=self._turn)
        returned = sum(share.num_tokens for share in step.shares if share.sequence is sequence)
        if returned:
            step.shares = [share for share in step.shares if share.sequence is not sequence]
        return returned

    def _free(self, sequence: Sequence) -> None:
        self._cache.release(sequence.blocks)
        sequence.blocks = []

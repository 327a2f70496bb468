"""Replays a trace against tiers: each request finds what is there and then is there itself."""

from __future__ import annotations

import heapq
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from policies.access import Access, Retention
from prefix_store.simulation.future import Future
from prefix_store.simulation.prefill_formula import PrefillFormula
from prefix_store.simulation.report import ReplayReport, TierReport
from prefix_store.simulation.tier import BlockShape, SimulatedTier, TierCount
from prefix_store.simulation.trace import Trace, TraceRequest

REPORT_EVERY = 256
"""Requests between two reports of the progress."""


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """What is the same for all policies."""

    warm_up: float = 0.5
    """Share of the requests that fill the tiers and are not counted."""
    token_bytes: int = 131_072
    """Bytes of KV per token; 128 KiB: 32 layers, 8 KV heads of 128, 16 bits, keys and values."""
    prefill: PrefillFormula = field(default=PrefillFormula())
    load: bool = True
    """False: what lies below memory is never brought up."""


@dataclass(slots=True)
class _Totals:
    requests: int = 0
    hit_requests: int = 0
    input_tokens: int = 0
    hit_tokens: int = 0
    prefill_s: float = 0.0
    saved_s: float = 0.0


class Replay:
    """`tiers`: from memory downwards, each linked to the next."""

    def __init__(
        self,
        tiers: Sequence[SimulatedTier],
        settings: ReplaySettings,
        *,
        future: Future | None = None,
        retention: Callable[[Access], Retention] | None = None,
    ) -> None:
        self._memory, self._lower = tiers[0], tiers[1:]
        self._tiers = tiers
        self._settings = settings
        self._future = future
        self._retention = retention
        self._turns: defaultdict[str, int] = defaultdict(int)
        self._pending: list[tuple[float, int, Access, TraceRequest]] = []
        """Answers that have not ended, the next to end first."""
        self._totals = _Totals()

    def run(
        self, trace: Trace, policy: str, progress: Callable[[int], None] = lambda _: None
    ) -> ReplayReport:
        """The whole trace. `progress` is told the number of requests done, now and then."""
        began = time.process_time()
        counted_from = int(len(trace.requests) * self._settings.warm_up)
        for number, request in enumerate(trace.requests):
            if number == counted_from:
                self._totals = _Totals()
                for tier in self._tiers:
                    tier.count = TierCount()
            if number % REPORT_EVERY == 0:
                progress(number)
            self.step(number, request)
        progress(len(trace.requests))
        return self._report(policy, trace, time.process_time() - began)

    def step(self, number: int, request: TraceRequest) -> None:
        """One request; `number` is its place in the trace."""
        now = request.time_s
        self._end_answers(now)
        if self._future is not None:
            self._future.now = number
        access = self._access(request)
        chain = request.chain
        shape = BlockShape(request.block_size, request.block_size * self._settings.token_bytes)
        run = self._memory.match(chain, access)
        sources = self._look_below(request, len(run), access)
        reached = sum(sources, len(run))
        inserted = self._memory.take_in(run, chain[len(run) :], shape, access, now)
        resident = len(run) + inserted
        for tier in self._lower:
            if tier.write_on_save:
                tier.save(chain[:resident], shape, access, now)
        # What memory has no room for cannot be loaded through it.
        reached = min(reached, resident)
        self._count(request, len(run), sources, reached)
        heapq.heappush(self._pending, (now + request.answer_s, number, access, request))
        if not request.answer_s:
            self._end_answers(now)

    def _access(self, request: TraceRequest) -> Access:
        turn = request.turn
        if request.session:
            if turn is None:
                turn = self._turns[request.session]
            self._turns[request.session] += 1
        access = Access(
            time_s=request.time_s,
            tenant=request.tenant,
            model=request.model,
            session=request.session,
            turn=turn or 0,
            prefix=request.prefix,
            num_tokens=request.input_tokens,
        )
        if self._retention is not None:
            access.retention = self._retention(access)
        return access

    def _look_below(self, request: TraceRequest, start: int, access: Access) -> list[int]:
        """Blocks that each lower tier adds to the run."""
        chain = request.chain
        for tier in self._lower:
            tier.gate.note(chain, access)
        found: list[int] = []
        reached = start
        for tier in self._lower:
            if reached == len(chain) or not self._settings.load:
                break
            end = max(reached, len(tier.match(chain, access)))
            found.append(end - reached)
            reached = end
        return found

    def _count(
        self, request: TraceRequest, in_memory: int, sources: Sequence[int], reached: int
    ) -> None:
        hit_tokens = request.tokens_in(reached)
        self._memory.count.hit_tokens += request.tokens_in(in_memory)
        start = in_memory
        for tier, num_blocks in zip(self._lower, sources, strict=False):
            end = min(start + num_blocks, reached)
            tier.count.hit_tokens += request.tokens_in(end) - request.tokens_in(start)
            tier.count.read_bytes += (end - start) * request.block_size * self._settings.token_bytes
            start = end
        totals, prefill = self._totals, self._settings.prefill
        cold_s = prefill.seconds(0, request.input_tokens)
        totals.requests += 1
        totals.hit_requests += reached > 0
        totals.input_tokens += request.input_tokens
        totals.hit_tokens += hit_tokens
        totals.prefill_s += cold_s
        totals.saved_s += cold_s - prefill.seconds(hit_tokens, request.input_tokens - hit_tokens)

    def _end_answers(self, now: float) -> None:
        """Tell the policies how the answers ended that have ended by now."""
        while self._pending and self._pending[0][0] <= now:
            ended_s, _, access, request = heapq.heappop(self._pending)
            access.ended_s = ended_s
            access.stop = request.stop
            access.output_tokens = request.output_tokens
            for tier in self._tiers:
                tier.reconsider(request.chain, access)

    def _report(self, policy: str, trace: Trace, replay_s: float) -> ReplayReport:
        totals = self._totals
        capacity_bytes = sum(tier.capacity_bytes for tier in self._tiers)
        return ReplayReport(
            policy=policy,
            capacity_tokens=capacity_bytes // self._settings.token_bytes,
            requests=totals.requests,
            hit_requests=totals.hit_requests,
            input_tokens=totals.input_tokens,
            hit_tokens=totals.hit_tokens,
            prefill_s=totals.prefill_s,
            saved_s=totals.saved_s,
            replay_s=replay_s,
            replayed_blocks=trace.num_blocks,
            tiers=tuple(
                TierReport(
                    tier.name,
                    tier.capacity_bytes,
                    tier.used_bytes,
                    tier.count.hit_tokens,
                    tier.count.written_bytes,
                    tier.count.read_bytes,
                    tier.count.evicted_blocks,
                    tier.count.refused_blocks,
                )
                for tier in self._tiers
            ),
        )

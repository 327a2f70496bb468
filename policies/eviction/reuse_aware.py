"""Reuse-aware: blocks whose reuse is worth the least per second of waiting go first, or do not come
in at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, Literal

from policies.access import NO_ACCESS, Access
from policies.base import Settings
from policies.eviction.base import B, EvictionQueue
from policies.eviction.cells import Cells
from policies.eviction.gap_model import GapModel, bucket_of
from policies.eviction.ghost_runs import GhostRuns
from policies.eviction.lru import LruQueue
from policies.eviction.lru_guard import LruGuard
from policies.eviction.request_runs import (
    NEW,
    RUNNING,
    Cover,
    Ghost,
    Past,
    Request,
    Run,
    Watch,
    watch_answer,
    watch_request,
)
from policies.eviction.watch_timers import WatchTimers

MAX_REQUESTS = 512
"""Requests whose prompts may still be coming in."""

GHOSTS = 1024
"""Runs that have left and are remembered, beside twice as many as there are blocks."""


class ReuseAwareQueue(Generic[B]):
    """Learns from every use of a block how soon blocks like it are used again, and ranks by that;
    LRU rules while it does better (LruGuard). Blocks that left or were refused are remembered for a
    while, so that reuse that was missed is seen too."""

    def __init__(self) -> None:
        self.model = GapModel()
        self.guard = LruGuard()
        self._cells = Cells[B]()
        self._lru = LruQueue[B]()
        self._fresh: dict[B, None] = {}
        """Candidates that have not been ranked yet."""
        self._requests: dict[int, Request] = {}
        """By the identity of their access, which they keep alive; the newest last."""
        self._last: Request | None = None
        self._ghosts = GhostRuns()
        self._timers = WatchTimers()
        self._now = 0.0
        self._blocks = 0
        self._tokens = 0
        self._block_tokens = 1
        """Of a block that does not say."""

    def __len__(self) -> int:
        return len(self._cells) + len(self._fresh)

    def insert(self, block: B) -> None:
        tokens = self._tokens_of(block)
        request = self._request(block.access)
        run = self._run(request, self._recall(request, block.hash, tokens))
        self._take(request, run, tokens)
        block.mark = run
        self._blocks += 1
        self._tokens += tokens

    def use(self, blocks: Sequence[B]) -> None:
        if not blocks:
            return
        request = self._request(blocks[0].access)
        old: Run | None = None
        run, tokens = None, 0
        for block in blocks:
            self.discard(block)
            mark = block.mark
            if mark is not old or run is None:
                self._reused(request, old, run, tokens)
                old, tokens = mark, 0
                run = self._successor(request, old)
            block.mark = run
            tokens += self._tokens_of(block)
        self._reused(request, old, run, tokens)

    def _successor(self, request: Request, old: Run | None) -> Run:
        """Where blocks belong after this use; a second look of the same request is no reuse."""
        if old is not None and old.request is request:
            return old
        return self._run(request, NEW if old is None else old.next_past(request.start_s))

    def _reused(self, request: Request, old: Run | None, run: Run | None, tokens: int) -> None:
        """Tokens in the tier passed from one run to another."""
        if run is None or run is old:
            return
        if old is not None:
            self._notice(old.request)
            old.shrink(tokens, request.start_s, reused=True)
            self.guard.settle(tokens, self.guard.shrank(old, tokens))
        self._take(request, run, tokens)

    def add(self, block: B) -> None:
        if block.mark is None:
            self.insert(block)
        if self._cells.drop(block):
            block.mark.candidates.discard(block)
        self._fresh[block] = None

    def discard(self, block: B) -> None:
        if block in self._fresh:
            del self._fresh[block]
        elif self._cells.drop(block):
            block.mark.candidates.discard(block)
        else:
            return
        self._lru.discard(block)

    def pop(self, now: float) -> B | None:
        self._rank(now)
        block = self._lru.pop(now) if self.guard.lru_rules else self._cells.pop()
        if block is None:
            return None
        if self.guard.lru_rules:
            self._cells.drop(block)
        else:
            self._lru.discard(block)
        block.mark.candidates.discard(block)
        return block

    def _rank(self, now: float) -> None:
        """The tier is full: bring everything up to date. Blocks that become candidates between two
        such moments are often none any more at the second one, so they are ranked only now."""
        self._advance(now)
        self.guard.capacity = self._tokens
        for block in self._fresh:
            run: Run = block.mark
            self._notice(run.request)
            watch = run.watches[-1]
            run.candidates.add(block)
            self._cells.put(block, watch.curve, watch.bucket)
            self._lru.add(block)
        self._fresh.clear()

    def remove(self, block: B) -> None:
        self.discard(block)
        run: Run | None = block.mark
        if run is None:
            return
        block.mark = None
        tokens = self._tokens_of(block)
        self._blocks -= 1
        self._tokens -= tokens
        self._remember(self._ghosts.with_tail(block.hash, block.depth, run, tokens))

    def admits(self, block: B, now: float) -> bool:
        request = self._request(block.access)
        self._rank(now)
        least = self._cells.least()
        if least is None or self.guard.lru_rules:
            return True
        path = RUNNING + self._past(request, block.hash).path()
        if self.model.curve(path).worth[bucket_of(self._now - request.start_s)] >= least:
            return True
        self._refuse(request, block)
        return False

    def _refuse(self, request: Request, block: B) -> None:
        """The rest of a prompt stays out; remembered as one ghost."""
        known = self._ghosts.get(block.hash)
        if known is not None and known.run.request is request:
            return
        tokens = self._tokens_of(block)
        rest = max(tokens, request.access.num_tokens - request.seen_tokens)
        run = self._run(request, self._recall(request, block.hash, rest))
        self._take(request, run, rest)
        self._remember(Ghost(block.hash, run, rest, block.depth))

    def _past(self, request: Request, block_hash: bytes) -> Past:
        """What is known of a block that is not here."""
        ghost = self._ghosts.get(block_hash)
        if ghost is not None:
            return ghost.run.next_past(request.start_s)
        if request.cover is not None:
            return request.cover.run.next_past(request.start_s)
        return NEW

    def _recall(self, request: Request, block_hash: bytes, tokens: int) -> Past:
        """The same, when the request uses the block and maybe what follows it."""
        ghost = self._ghosts.take(block_hash)
        if ghost is not None and ghost.run.request is not request:
            self._uncover(request)
            request.cover = Cover(ghost.run, ghost.tokens)
        elif ghost is not None:
            self._lose(ghost.run, ghost.tokens)
        cover = request.cover
        if cover is None:
            return NEW
        used = min(tokens, cover.tokens)
        cover.tokens -= used
        if not cover.tokens:
            request.cover = None
        self._notice(cover.run.request)
        cover.run.shrink(used, request.start_s, reused=True)
        self.guard.settle(0, self.guard.shrank(cover.run, used))
        return cover.run.next_past(request.start_s)

    def _uncover(self, request: Request) -> None:
        """What was expected next did not come: the prompt has parted from the older one."""
        cover, request.cover = request.cover, None
        if cover is not None:
            self._lose(cover.run, cover.tokens)

    def _remember(self, ghost: Ghost) -> None:
        replaced = self._ghosts.add(ghost)
        if replaced is not None:
            self._lose(replaced.run, replaced.tokens)
        for oldest in self._ghosts.trim(GHOSTS + 2 * self._blocks):
            self._lose(oldest.run, oldest.tokens)

    def _lose(self, run: Run, tokens: int) -> None:
        """Whether these tokens are used again will not be seen."""
        run.shrink(tokens, self._now, reused=False)
        self.guard.shrank(run, tokens)

    def _take(self, request: Request, run: Run, tokens: int) -> None:
        """A request has used tokens."""
        for watch in run.watches:
            if not watch.timed:
                watch.bucket = bucket_of(self._now - watch.start_s)
                self._timers.set(watch)
        run.grow(tokens, self._now)
        request.seen_tokens += tokens
        self.guard.grew(run, tokens)
        self.guard.requested(tokens)

    def _request(self, access: Access) -> Request:
        """The request of an access, known or new. Blocks of unknown requests share nothing."""
        known = self._requests.get(id(access))
        if known is not None:
            return known
        if access is NO_ACCESS:
            return Request(access, self._now)
        self._advance(access.time_s)
        prompt_tokens = self._last.prompt_tokens if self._last is not None else access.num_tokens
        request = self._last = Request(access, access.time_s)
        self._requests[id(access)] = request
        if len(self._requests) > MAX_REQUESTS:
            self._uncover(self._requests.pop(next(iter(self._requests))))
        self.guard.prompt(prompt_tokens)
        if self.model.requested(self._now, prompt_tokens):
            self._cells.reorder()
        return request

    def _run(self, request: Request, past: Past) -> Run:
        run = request.runs.get(past)
        if run is None:
            run = request.runs[past] = Run(request, past)
            self._timers.set(watch_request(self.model, run, self._now))
            if request.ended:
                self._watch_answer(run)
        return run

    def _notice(self, request: Request) -> None:
        """Maybe it has become known how the answer ended."""
        if request.ended or not request.has_ended:
            return
        request.ended = True
        for run in request.runs.values():
            self._watch_answer(run)

    def _watch_answer(self, run: Run) -> None:
        ended_s = run.request.access.ended_s
        watch = watch_answer(self.model, run, self._now if ended_s is None else ended_s, self._now)
        self._timers.set(watch)
        self._move(watch)

    def _advance(self, now: float) -> None:
        """Time has come to `now`: runs grow older."""
        self._now = max(self._now, now)
        while (watch := self._timers.due(self._now)) is not None:
            watch.advance()
            self._notice(watch.run.request)
            if watch is watch.run.watches[-1]:
                self._move(watch)
            self._timers.set(watch)

    def _move(self, watch: Watch) -> None:
        for block in watch.run.candidates:
            self._cells.put(block, watch.curve, watch.bucket)

    def _tokens_of(self, block: B) -> int:
        if block.num_tokens:
            self._block_tokens = block.num_tokens
        return self._block_tokens


class ReuseAwareEviction(Settings):
    """For agent and chat traffic. Learns online, per category, how soon blocks are used again:
    after a tool call or the end of a turn, by their uses so far and their last gap. Evicts, or does
    not let in, what yields the fewest reused tokens per second of waiting (Gittins index), tail
    first; falls back to LRU while LRU would find more. Sources: J. Gittins, "Bandit processes and
    dynamic allocation indices", 1979; hit density per time as in N. Beckmann, H. Chen, A. Cidon,
    "LHD: Improving cache hit rate by maximizing hit density", NSDI 2018."""

    kind: Literal["reuse_aware"] = "reuse_aware"

    def queue(self) -> EvictionQueue[Any]:
        return ReuseAwareQueue[Any]()

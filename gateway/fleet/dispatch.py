"""From a rendered prompt to a place at a replica: candidates, decision, waiting, bookkeeping."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Protocol

from gateway.fleet.assignment import Asked, Assignment
from gateway.fleet.candidates import Known, candidate_of, work_of
from gateway.fleet.decisions import Decisions, Made
from gateway.fleet.places import PlaceLostError
from gateway.fleet.replica import Replica
from gateway.fleet.warming import Warming, WarmingPrefixes
from gateway.web.errors import TooManyRequestsError, UnavailableError
from policies.fleet import CoalescingConfig
from policies.routing.base import Candidate, Decision, Evidence, Router
from prefix_store.base import BlockHash
from prefix_store.residency import Match


class Residency(Protocol):
    """Where blocks are."""

    def see(self, hashes: Sequence[BlockHash]) -> Match:
        """What every holder has of a prompt, whose blocks are now known to be asked for."""

    def match(self, hashes: Sequence[BlockHash]) -> Match:
        """What every holder has of a prompt."""


class Knowledge(Protocol):
    """How well it is known what a replica holds."""

    def evidence(self, engine_id: str) -> Evidence:
        """Now."""

    def answered(self, engine_id: str, hashes: Sequence[BlockHash], now: float) -> None:
        """It has computed this prompt; `now` of time.monotonic()."""


class Members(Protocol):
    """The replicas of a fleet."""

    def serving(self, model: str) -> Sequence[Replica]:
        """Those that serve a model, whatever their condition."""


class Dispatcher:
    """Finds a place for every request: `async with dispatcher.place(asked) as assignment`."""

    def __init__(
        self,
        members: Members,
        router: Router,
        residency: Residency,
        knowledge: Knowledge,
        *,
        coalescing: CoalescingConfig,
        decisions: Decisions | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._members = members
        self._router = router
        self._residency = residency
        self._knowledge = knowledge
        self._coalescing = coalescing
        self._warming = WarmingPrefixes()
        self.decisions = decisions or Decisions()
        self._clock = clock

    def see(self, asked: Asked) -> Match | None:
        """Note that a prompt is asked for; None where it is not known."""
        if asked.prompt is not None:
            asked.match = self._residency.see(asked.hashes)
        return asked.match

    def place(self, asked: Asked) -> Placing:
        """A place at the best replica that has not failed this request yet.

        Raises UnavailableError, TooManyRequestsError, DeadlineError.
        """
        return Placing(self, asked)

    def first_token(self, asked: Asked, assignment: Assignment) -> None:
        """Its prompt has been computed."""
        now = self._clock()
        assignment.replica.estimate.first_token(asked.key, now)
        self._knowledge.answered(assignment.replica.id, asked.hashes, now)
        if assignment.warming is not None:
            assignment.warming.done()

    def now(self) -> float:
        """Of the clock that all estimates share."""
        return self._clock()

    def failed(self, asked: Asked, assignment: Assignment, reason: str) -> None:
        """The replica could not answer; it is not asked again."""
        asked.tried.add(assignment.replica.id)
        assignment.ended(self._clock(), None)
        self.decisions.retries[reason] += 1

    def has_others(self, asked: Asked, assignment: Assignment) -> bool:
        """Whether another replica could be asked."""
        return any(
            each.condition.accepts or each.condition.may_be_tried
            for each in self._members.serving(asked.model)
            if each is not assignment.replica and each.id not in asked.tried
        )

    async def enter(self, asked: Asked) -> Assignment:
        """See `place`; the caller gives it back with `leave`."""
        began = self._clock()
        joined: Warming | None = None
        may_join = self._coalescing.max_wait > 0
        patience: _Patience | None = None
        while True:
            options = self._options(asked)
            match = self._match(asked)
            if may_join:
                joined = self._joinable(asked, options, match)
            known = Known(match, joined)
            decision = self._router.decide(asked.route, self._candidates(asked, options, known))
            if may_join and joined is not None and joined.replica == decision.best.replica:
                self.decisions.joined += 1
                if patience is None:
                    patience = _Patience(self._coalescing.max_wait, asked.ticket.deadline)
                await joined.wait(patience.left_s)
                # One that failed is joined by nobody: of those who waited for it one goes first.
                may_join = joined.failed and patience.left_s > 0
                joined = None if joined.failed else joined
                continue
            claim = await self._enter_first(asked, decision, options, known)
            if claim is None:
                continue
            made = Made(
                decision,
                claim.replica.id,
                asked.request_id,
                asked.num_tokens,
                attempt=len(asked.tried) + 1,
                waited_s=self._clock() - began,
            )
            self.decisions.add(made)
            return Assignment(
                asked.key,
                claim.replica,
                made,
                match,
                device_blocks=known.device_blocks(asked, claim.replica),
                captured_blocks=known.captured_blocks(asked, claim.replica),
                warming=claim.warming,
            )

    def leave(self, assignment: Assignment) -> None:
        """Give the place back."""
        if assignment.warming is not None:
            assignment.warming.failed_or_done()
        assignment.replica.places.leave()

    def _match(self, asked: Asked) -> Match | None:
        """From the look-up that noted the prompt, the first time."""
        match, asked.match = asked.match, None
        if match is None and asked.prompt is not None:
            match = self._residency.match(asked.hashes)
        return match

    def _options(self, asked: Asked) -> Sequence[Replica]:
        serving = self._members.serving(asked.model)
        left = [each for each in serving if each.id not in asked.tried]
        ready = [each for each in left if each.condition.accepts]
        # Right after the start of the gateway, or of its only engine: better to ask than to refuse.
        ready = ready or [each for each in left if each.condition.may_be_tried]
        if not ready:
            reasons = "; ".join(f"{each.id}: {each.condition.reason}" for each in serving[:4])
            raise UnavailableError(
                f"no replica can answer now ({reasons or 'there is none'}); try again soon",
                retry_after_s=1,
            )
        return ready

    def _joinable(
        self, asked: Asked, options: Sequence[Replica], match: Match | None
    ) -> Warming | None:
        """Who computes more of this prompt right now than anybody holds."""
        if match is None:
            return None
        held = max(each.captured_blocks(match) for each in options)
        least = held + self._coalescing.min_tokens // asked.block_size
        warming = self._warming.find(asked.hashes, least)
        if warming is None or all(each.id != warming.replica for each in options):
            return None
        return warming

    def _candidates(
        self, asked: Asked, options: Sequence[Replica], known: Known
    ) -> Sequence[Candidate]:
        now, evidence = self._clock(), self._knowledge.evidence
        if known.match is None:
            return [candidate_of(asked, each, known, Evidence.FALLBACK, now) for each in options]
        return [candidate_of(asked, each, known, evidence(each.id), now) for each in options]

    async def _enter_first(
        self,
        asked: Asked,
        decision: Decision,
        options: Sequence[Replica],
        known: Known,
    ) -> _Claim | None:
        """The best of them that has a place, or room to wait for one. None when the one that was
        waited for is lost."""
        by_id = {each.id: each for each in options}
        full: TooManyRequestsError | None = None
        for score in decision.ranking:
            replica = by_id[score.candidate.replica]
            claim = self._claim(asked, replica, score.candidate, known)
            try:
                cost = max(1, asked.num_tokens - score.candidate.reused_tokens)
                await replica.places.enter(replace(asked.ticket, cost=cost))
            except BaseException as error:  # cancelled ones too must leave nothing behind
                claim.drop(asked, self._clock())
                if isinstance(error, PlaceLostError):
                    return None
                if not isinstance(error, TooManyRequestsError):
                    raise
                full = error
            else:
                return claim
        assert full is not None
        raise full

    def _claim(self, asked: Asked, replica: Replica, candidate: Candidate, known: Known) -> _Claim:
        """Before anything is awaited: the next decision has to know of this one."""
        work = work_of(asked, candidate.device_tokens, candidate.stored_tokens)
        replica.estimate.sent(asked.key, work, self._clock())
        captured = replica.captured_blocks(known.match)
        missing = (len(asked.hashes) - captured) * asked.block_size
        follows = known.joined is not None and known.joined.replica == replica.id
        if follows or missing < max(1, self._coalescing.min_tokens):
            return _Claim(replica, None)
        return _Claim(replica, self._warming.begin(asked.hashes, captured, replica.id))


class _Patience:
    """How long a request still waits for what others compute."""

    def __init__(self, max_s: float, deadline: float | None) -> None:
        """`deadline`: of the event loop's time."""
        self._loop = asyncio.get_running_loop()
        self._until = self._loop.time() + max_s
        if deadline is not None:
            self._until = min(self._until, deadline)

    @property
    def left_s(self) -> float:
        return max(0.0, self._until - self._loop.time())


@dataclass(frozen=True, slots=True)
class _Claim:
    """A replica that was told of a request, which has no place there yet."""

    replica: Replica
    warming: Warming | None

    def drop(self, asked: Asked, now: float) -> None:
        """It got none."""
        self.replica.estimate.ended(asked.key, now, None)
        if self.warming is not None:
            self.warming.failed_or_done()


@dataclass(slots=True)
class Placing:
    """The block in which a request has its place."""

    dispatcher: Dispatcher
    asked: Asked
    assignment: Assignment | None = None

    async def __aenter__(self) -> Assignment:
        self.assignment = await self.dispatcher.enter(self.asked)
        return self.assignment

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self.assignment is not None
        self.dispatcher.leave(self.assignment)
        if error is not None:  # else its record says what it took
            self.assignment.ended(self.dispatcher.now(), None)

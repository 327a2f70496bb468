"""What is expected of one replica: learned online from the requests that it answered.

vLLM computes prompts first come first served, so a new request waits until the prompts before it
are computed. Ours are known one by one; those of others only by the engine's gauges.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from policies.routing.correction import Correction
from policies.routing.engine_load import EngineLoad
from policies.routing.fleet_prior import FleetPrior
from policies.routing.kv_room import KvRoom
from policies.routing.prefill_model import TRUSTED
from policies.routing.prefill_queue import PrefillQueue
from policies.routing.work import Expected, Observed, Work

__all__ = ["EngineLoad", "Expected", "FleetPrior", "Observed", "ReplicaEstimate", "Work"]

MAX_REQUESTS = 16_384
"""That are remembered as being with a replica; then the oldest are forgotten."""
PENDING_EXPIRY_S = 600.0
"""A request without a first token is forgotten after it."""
RUNNING_EXPIRY_S = 3600.0
"""A request without an end is forgotten after it."""
GAUGES_EXPIRY_S = 15.0
"""What the engine said of itself counts for so long."""

_IGNORED = 1.5
"""Replicas whose speeds differ by less count as equal: a short prompt that shares its steps with a
long one looks slow, and its replica would be avoided for it."""

_LATE_S = 0.02
"""What networks and the ends of steps may add to every prompt, short or long. If it counted, who
gets only short ones would look slow, and would never get others."""

_MIN_QUEUE_S = 0.005
"""Queues expected to be shorter teach nothing: what is seen of them is the step under way."""
_TYPICAL_GAIN = 0.05
_DEFAULT_TYPICAL_S = 0.1


@dataclass(slots=True)
class _Sent:
    """A request of ours, as it was judged when it was sent."""

    work: Work
    queue_s: float
    """Uncorrected."""
    sent: float
    first_token: float | None = None


class ReplicaEstimate:
    """One per replica; pure: every time is an argument, in seconds of one monotonic clock. Every
    operation is O(1)."""

    def __init__(self, prior: FleetPrior) -> None:
        self._prior = prior
        self._speed = Correction(bound=16.0, ignored=_IGNORED, floor_s=_LATE_S)
        """Of computing, against the fleet."""
        self._loading = Correction(bound=16.0)
        self._interference = Correction(bound=4.0, floor_s=_LATE_S)
        """Of queues, which the decoding of running requests prolongs."""
        self._typical_s = _DEFAULT_TYPICAL_S
        """Of computing one prompt."""
        self._hold_s = 0.0
        """From a first token to the request's end, typically: so long it holds its memory."""
        self._requests: dict[str, _Sent] = {}
        self._queue = PrefillQueue()
        self._others_running = 0
        self._others_waiting = 0
        self._tokens = 0
        """Of the prompts of our requests."""
        self._started_tokens = 0
        """Of those that have their first token."""
        self._kv_room = KvRoom()
        self._polled = 0.0

    @property
    def running(self) -> int:
        """Requests that have their first token, and those of others that are scheduled."""
        return len(self._requests) - len(self._queue) + self._others_running

    @property
    def waiting(self) -> int:
        """Requests without a first token, and those of others that are not scheduled."""
        return len(self._queue) + self._others_waiting

    @property
    def kv_free(self) -> float | None:
        """Share of KV memory that no running request holds; None where the engine does not say."""
        return self._kv_room.free(self._tokens)

    def expect(self, work: Work, now: float) -> Expected:
        """For a request that would be sent now."""
        queue_s = self._queue_s(now) * self._interference.factor
        missing = self._missing(work)
        if missing > 0:
            # It waits until others give memory back, and what it would reuse is taken meanwhile.
            queue_s += self._kv_room.share(missing) * self._hold_s
            work = work.without(missing)
        return Expected(queue_s, self._load_s(work), self._prefill_s(work))

    def sent(self, key: str, work: Work, now: float) -> None:
        """A request was given to this replica. To be called right after the decision, before
        anything is awaited: the next decision has to know of it."""
        self._forget(now)
        self._drop(key, now)
        work, queue_s = work.without(self._missing(work)), self._queue_s(now)
        self._requests[key] = _Sent(work, queue_s, now)
        self._tokens += work.num_tokens
        added_s = self._prior.prefill.added_seconds(work.uncached_tokens, work.context_tokens)
        added_s *= self._speed.factor
        self._queue.add(key, added_s, now)
        self._typical_s += _TYPICAL_GAIN * (added_s - self._typical_s)

    def first_token(self, key: str, now: float) -> None:
        """Its prompt is computed. Unknown keys are ignored."""
        self._queue.remove(key, now)
        request = self._requests.get(key)
        if request is not None and request.first_token is None:
            request.first_token = now
            self._started_tokens += request.work.num_tokens

    def ended(self, key: str, now: float, observed: Observed | None) -> None:
        """However it ended; a second time, or for an unknown key, nothing happens. `observed` of
        one that was answered."""
        request = self._drop(key, now)
        if request is not None and request.first_token is not None:
            self._hold_s += _TYPICAL_GAIN * (now - request.first_token - self._hold_s)
        if request is not None and observed is not None:
            self._learn(request, observed)

    def polled(self, load: EngineLoad, now: float) -> None:
        """What the engine says of itself."""
        self._forget(now)
        others = max(0, load.running + load.waiting - len(self._requests))
        self._others_waiting = min(others, max(0, load.waiting - len(self._queue)))
        self._others_running = others - self._others_waiting
        self._kv_room.polled(load, self._tokens, self._started_tokens)
        self._polled = now

    def restarted(self) -> None:
        """A new incarnation: nothing is with it. How fast it is stays known."""
        self._requests.clear()
        self._queue.clear()
        self._tokens = self._started_tokens = 0
        self._forget_gauges()

    def _queue_s(self, now: float) -> float:
        """Until the prompts that are with it are computed; uncorrected."""
        queue_s = self._queue.seconds(now)
        if self._others_waiting:
            age_s = max(0.0, now - self._polled)
            if age_s < GAUGES_EXPIRY_S:
                queue_s += max(0.0, self._others_waiting * self._typical_s - age_s)
        return queue_s

    def _missing(self, work: Work) -> int:
        """Tokens by which it does not fit beside all that is with the replica."""
        return self._kv_room.missing_tokens(self._tokens + work.num_tokens)

    def _load_s(self, work: Work) -> float:
        if work.stored_tokens == 0:
            return 0.0
        return self._prior.load_s(work) * self._loading.factor

    def _prefill_s(self, work: Work) -> float:
        seconds = self._prior.prefill.seconds(work.uncached_tokens, work.context_tokens)
        return seconds * self._speed.factor

    def _learn(self, request: _Sent, observed: Observed) -> None:
        work, prefill_s = observed.work, observed.prefill_s
        if prefill_s is None:
            prefill_s = _prefill_without_report(request, observed)
        model = self._prior.prefill
        # Before the fleet's estimates are good, their own errors would count as this replica's.
        if model.observations >= TRUSTED and work.uncached_tokens > 0 and prefill_s is not None:
            expected_s = model.seconds(work.uncached_tokens, work.context_tokens)
            self._speed.observe(expected_s, prefill_s)
        if self._prior.knows_loads and work.stored_tokens > 0 and observed.load_s > 0.0:
            self._loading.observe(self._prior.load_s(work), observed.load_s)
        self._prior.observe(observed, prefill_s)
        if observed.queue_s is not None and request.queue_s >= _MIN_QUEUE_S:
            self._interference.observe(request.queue_s, observed.queue_s)

    def _drop(self, key: str, now: float) -> _Sent | None:
        request = self._requests.pop(key, None)
        if request is not None:
            self._queue.remove(key, now)
            self._tokens -= request.work.num_tokens
            if request.first_token is not None:
                self._started_tokens -= request.work.num_tokens
        return request

    def _forget(self, now: float) -> None:
        """What never ended. Both maps are in the order of sending, so their first ones are the
        oldest."""
        while (oldest := self._queue.oldest()) is not None:
            if now - self._requests[oldest].sent <= PENDING_EXPIRY_S:
                break
            self._drop(oldest, now)
        for key, request in list(itertools.islice(self._requests.items(), 8)):
            if now - request.sent > RUNNING_EXPIRY_S or len(self._requests) >= MAX_REQUESTS:
                self._drop(key, now)
        if now - self._polled > GAUGES_EXPIRY_S:
            self._forget_gauges()

    def _forget_gauges(self) -> None:
        self._others_running = self._others_waiting = 0
        self._kv_room.forget()


def _prefill_without_report(request: _Sent, observed: Observed) -> float | None:
    """From the whole time, of a request that met no queue."""
    if observed.ttft_s is None or request.queue_s > 0.0:
        return None
    return max(0.0, observed.ttft_s - observed.load_s)

"""Whether a replica may get requests: a pure state machine that is fed with what others saw."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

from policies.fleet import HealthConfig

MAX_EJECTION_S = 60.0
"""Back-off ends here, unless the shortest ejection is configured longer."""

QUIET_S = 120.0
"""An ejection that comes later than this after the last return begins at the shortest again."""

SLOW_START_FLOOR = 0.1
"""Share of a replica that has just come back."""


class State(enum.Enum):
    """What people are told of a replica."""

    STARTING = "starting"
    READY = "ready"
    EJECTED = "ejected"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class Transition:
    """A change that its owner has to act upon. The states are equal where a replica is lost, or is
    back, while it drains."""

    before: State
    after: State
    reason: str


class Condition:
    """The condition of one replica.

    | state    | seen                                               | next     |
    |----------|----------------------------------------------------|----------|
    | starting | `successes` probes in a row, or an answer          | ready    |
    | starting | anything else                                      | starting |
    | ready    | a connection refused                               | ejected  |
    | ready    | `failures` failed probes in a row                  | ejected  |
    | ready    | `failures` failed requests in a row                | ejected  |
    | ready    | stalled                                            | ejected  |
    | ejected  | `successes` probes in a row, the last one after    | ready    |
    |          | the ejection's time                                |          |
    | ejected  | anything else                                      | ejected  |
    | any      | drain                                              | draining |
    | draining | undrain                                            | what it would be without |

    Probes and requests count apart: an engine may answer its probes and fail at its work. While it
    drains the other transitions go on unseen. An ejection lasts at least `ejection` seconds, twice
    as long each time that it follows soon upon a return, up to MAX_EJECTION_S.
    """

    def __init__(
        self,
        config: HealthConfig,
        clock: Callable[[], float],
        *,
        others_settled: Callable[[], bool],
        changed: Callable[[Transition], None] | None = None,
    ) -> None:
        """`others_settled`: whether another replica is `settled`; it is asked when this one gets
        ready, which is slow only then: a fleet that starts, or comes back, as a whole must not
        throttle itself. `changed` is called after each change of `state` or `is_lost`. `clock`:
        seconds, monotonic."""
        self._config = config
        self._clock = clock
        self._others_settled = others_settled
        self._changed = changed
        self._health = State.STARTING
        self._draining = False
        self._health_reason = "has not answered yet"
        self.since = clock()
        """When it came into this state."""
        self.ejections = 0
        """Since it was made."""
        self._successes = 0
        self._failed_probes = 0
        self._failed_requests = 0
        self._returned_at = float("-inf")
        self._serves_from = float("-inf")
        self._slow_from: float | None = None
        self._ejected_until = float("-inf")
        self._ejection_s = 0.0
        """Of the last ejection; 0 before the first."""
        self._must_compute = False
        self._refused = False
        """It was ejected since nothing listened."""

    @property
    def state(self) -> State:
        return State.DRAINING if self._draining else self._health

    @property
    def reason(self) -> str:
        """One sentence for people."""
        if not self._draining:
            return self._health_reason
        hidden = "" if self._health is State.READY else f"; {self._health_reason}"
        return f"gets no new requests{hidden}"

    @property
    def accepts(self) -> bool:
        """It may get new requests."""
        return self._health is State.READY and not self._draining

    @property
    def may_be_tried(self) -> bool:
        """Where no replica accepts: a request costs nothing here, since nothing is known of this
        one, or nothing listened when it was looked at last."""
        return not self._draining and (
            self._health is State.STARTING or (self.is_lost and self._refused)
        )

    @property
    def is_lost(self) -> bool:
        """Ejected, also while it drains: requests there that got not a byte should go elsewhere."""
        return self._health is State.EJECTED

    @property
    def must_compute(self) -> bool:
        """It stalled, while its probes may well have succeeded: only a token that it computes is
        a probe that counts."""
        return self._must_compute

    @property
    def settled(self) -> bool:
        """It has taken its full share for a while."""
        if not self.accepts:
            return False
        return self._clock() - self._serves_from >= self._config.slow_start

    @property
    def age_s(self) -> float:
        """How long it has been in this state."""
        return self._clock() - self.since

    def share(self, now: float) -> float:
        """Of the requests that it could take, in (0, 1]: less than 1 during a slow start."""
        if self._slow_from is None:
            return 1.0
        passed = (now - self._slow_from) / self._config.slow_start
        if passed >= 1.0:
            self._slow_from = None
            return 1.0
        return SLOW_START_FLOOR + (1.0 - SLOW_START_FLOOR) * max(0.0, passed)

    def probe_ok(self) -> None:
        """It answered a probe as it should."""
        self._failed_probes = 0
        if self._health is State.READY:
            return
        self._successes += 1
        due = self._health is State.STARTING or self._clock() >= self._ejected_until
        if due and self._successes >= self._config.successes:
            self._get_ready()

    def probe_failed(self, reason: str, *, refused: bool = False) -> None:
        """It did not. `reason` such as "no answer to /health within 3 s"; `refused`: there is
        nothing that listens, which is proof enough."""
        self._successes = 0
        self._failed_probes += 1
        self._failed(reason, self._failed_probes, refused)

    def request_ok(self) -> None:
        """A request was answered."""
        self._failed_requests = 0
        if self._health is State.STARTING:
            self._get_ready()

    def request_failed(self, reason: str, *, refused: bool = False) -> None:
        """A request failed by the replica's fault: 5xx, silence, an answer that broke off."""
        if self._health is not State.READY:
            return  # sent before it was ejected: that says nothing new
        self._failed_requests += 1
        self._failed(reason, self._failed_requests, refused)

    def stalled(self, reason: str) -> None:
        """It has requests, and nothing moves."""
        if self._health is State.READY:
            self._must_compute = True
            self._eject(reason)

    def drain(self) -> None:
        """No new requests, until `undrain`."""
        before, was_lost = self.state, self.is_lost
        self._draining = True
        self._note(before, was_lost)

    def undrain(self) -> None:
        """Back to what it would be; slowly, where others serve."""
        before, was_lost = self.state, self.is_lost
        if self._draining:
            self._draining = False
            if self._health is State.READY:
                self._start_slowly()
        self._note(before, was_lost)

    def restarted(self) -> None:
        """The engine is a new process, which nothing counts against, with cold caches."""
        self._successes = self._failed_probes = self._failed_requests = 0
        self._must_compute = False
        if self._health is State.READY:
            self._start_slowly()

    def _failed(self, reason: str, in_a_row: int, refused: bool) -> None:
        if self._health is not State.READY:
            self._refused = refused
            self._health_reason = (
                f"has not answered yet: {reason}" if self._health is State.STARTING else reason
            )
        elif refused:
            self._eject(reason, refused=True)
        elif in_a_row >= self._config.failures:
            self._eject(f"{reason}, {in_a_row} times in a row" if in_a_row > 1 else reason)

    def _eject(self, reason: str, *, refused: bool = False) -> None:
        self._refused = refused
        before, was_lost, now = self.state, self.is_lost, self._clock()
        shortest = self._config.ejection
        soon = now - self._returned_at < QUIET_S
        longest = max(shortest, MAX_EJECTION_S)
        self._ejection_s = (
            min(2 * self._ejection_s, longest) if soon and self._ejection_s else shortest
        )
        self._ejected_until = now + self._ejection_s
        self._successes = self._failed_probes = self._failed_requests = 0
        self._slow_from = None
        self._health, self._health_reason = State.EJECTED, reason
        self.ejections += 1
        self._note(before, was_lost)

    def _get_ready(self) -> None:
        before, was_lost = self.state, self.is_lost
        self._successes = self._failed_probes = self._failed_requests = 0
        self._must_compute = False
        self._health, self._health_reason = State.READY, "answers"
        self._returned_at = self._clock()
        self._start_slowly()
        self._note(before, was_lost)

    def _start_slowly(self) -> None:
        self._serves_from = now = self._clock()
        slow = self._config.slow_start > 0 and self._others_settled()
        self._slow_from = now if slow else None

    def _note(self, before: State, was_lost: bool) -> None:
        """Tell the owner when the state is another than before."""
        after = self.state
        if after is not before:
            self.since = self._clock()
        if self._changed is not None and (after is not before or self.is_lost is not was_lost):
            self._changed(Transition(before, after, self.reason))

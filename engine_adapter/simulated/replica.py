"""A simulated engine's (engine_adapter.simulated) scheduler on the event loop's clock.

Nothing runs between two steps: one timer waits for the end of the running step. Steps end at
absolute times of the simulated clock, so a late timer does not make them longer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from engine_adapter.simulated.events import EventLog
from engine_adapter.simulated.options import SimulationOptions
from engine_adapter.simulated.scheduler import Scheduler
from engine_adapter.simulated.sequence import Job, Sequence
from prefix_store.event_publisher import EventPublisher

MAX_CATCH_UP_S = 0.25
"""Real time that is made up for at most. What is beyond, the process was stopped, and an engine
that is stopped computes nothing."""


class Replica:
    """One simulated engine without its HTTP. To be used on one event loop; close it at the end."""

    def __init__(
        self,
        options: SimulationOptions,
        publisher: EventPublisher | None,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """`loop`: whose clock and timers it uses; None: the running one."""
        self._loop = loop or asyncio.get_running_loop()
        self._speed = options.speed
        self._publisher = publisher
        self._log = EventLog(options.block_size, enabled=publisher is not None)
        self.scheduler = Scheduler(options.limits, options.timing, self._log)
        self._zero = self._loop.time()
        """Real time at which the simulated clock showed 0."""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due_at = 0.0
        self.latest_s = 0.0
        """Real seconds by which a step ended late, at most so far."""
        self.lost_s = 0.0
        """Real seconds by which the clock was set back, so far."""
        self._halted_at: float | None = None
        """What the simulated clock shows while it stands still."""

    @property
    def clock_s(self) -> float:
        """The simulated clock."""
        if self._halted_at is not None:
            return self._halted_at
        return (self._loop.time() - self._zero) * self._speed

    def submit(self, job: Job, progressed: Callable[[Sequence, float], None]) -> Sequence:
        """A request arrives now."""
        self._advance()
        sequence = self.scheduler.add(job, self.clock_s)
        sequence.progressed = progressed
        self._settle()
        return sequence

    def abort(self, sequence: Sequence) -> None:
        """Nobody waits for it any more. Does nothing when it is complete."""
        if sequence.is_finished:
            return
        self._advance()
        self.scheduler.abort(sequence, self.clock_s)
        self._settle()

    def halt(self) -> None:
        """The clock stands still until `resume`: requests are taken, but nothing is computed."""
        if self._halted_at is None:
            self._advance()
            self._halted_at = self.clock_s
            self._settle()

    def resume(self) -> None:
        """Go on where it stopped."""
        if self._halted_at is not None:
            self._zero = self._loop.time() - self._halted_at / self._speed
            self._halted_at = None
            self._settle()

    def close(self) -> None:
        """Stop for good."""
        self._halted_at = self.clock_s
        self._stop_timer()

    def _advance(self) -> None:
        """Catch up with the clock, or set it back when too much time was lost."""
        due_at = self.scheduler.due_at
        if due_at is None or self._halted_at is not None:
            return
        late_s = self._loop.time() - self._real(due_at)
        self.latest_s = max(self.latest_s, late_s)
        if late_s > MAX_CATCH_UP_S:
            self._zero += late_s
            self.lost_s += late_s
        self.scheduler.advance(self.clock_s)

    def _settle(self) -> None:
        """Publish what happened and wait for what is next."""
        if self._publisher is not None and (events := self._log.take()):
            self._publisher.publish(events)
        due_at = self.scheduler.due_at
        if due_at is None or self._halted_at is not None:
            self._stop_timer()
        elif self._timer is None or due_at != self._timer_due_at:
            self._stop_timer()
            self._timer_due_at = due_at
            self._timer = self._loop.call_at(self._real(due_at), self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._advance()
        self._settle()

    def _real(self, clock_s: float) -> float:
        return self._zero + clock_s / self._speed

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

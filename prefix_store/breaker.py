"""A circuit breaker: after some faults in a row nobody waits for a broken server any more."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BreakerSettings:
    """When to open, and how long to wait between probes: the pause doubles."""

    faults_to_open: int = 3
    """In a row."""
    first_pause_s: float = 0.25
    longest_pause_s: float = 10.0


class CircuitBreaker:
    """Pure. Closed: everything goes through. Open: nothing does, but for one probe after each
    pause (half open); its success closes the breaker. `now` is time.monotonic()."""

    def __init__(self, settings: BreakerSettings | None = None) -> None:
        self._settings = settings or BreakerSettings()
        self._faults_in_a_row = 0
        self._pause_s = 0.0
        self._probe_at: float | None = None
        self._probing = False

    @property
    def is_closed(self) -> bool:
        return self._probe_at is None

    @property
    def state(self) -> str:
        """closed, open or half_open."""
        if self.is_closed:
            return "closed"
        return "half_open" if self._probing else "open"

    def wait_s(self, now: float) -> float:
        """Until a probe is due."""
        return 0.0 if self._probe_at is None else max(0.0, self._probe_at - now)

    def begin_probe(self, now: float) -> bool:
        """Whether the caller shall probe now; it tells how that went by `succeeded` or `failed`."""
        if self._probe_at is None or self._probing or now < self._probe_at:
            return False
        self._probing = True
        return True

    def succeeded(self) -> None:
        self._faults_in_a_row = 0
        self._pause_s = 0.0
        self._probe_at = None
        self._probing = False

    def failed(self, now: float) -> bool:
        """True when this fault opened the breaker. Faults of what was under way when it opened
        change nothing."""
        if self._probe_at is not None and not self._probing:
            return False
        opens = self._probe_at is None
        self._faults_in_a_row += 1
        if opens and self._faults_in_a_row < self._settings.faults_to_open:
            return False
        self._probing = False
        self._pause_s = min(
            2 * self._pause_s or self._settings.first_pause_s, self._settings.longest_pause_s
        )
        self._probe_at = now + self._pause_s
        return opens

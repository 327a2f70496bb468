"""Whether anything moves at a replica that has requests."""

from __future__ import annotations


class Activity:
    """Two numbers that the relay keeps; every time is in seconds of one monotonic clock."""

    __slots__ = ("in_flight", "moved_at")

    def __init__(self) -> None:
        self.in_flight = 0
        """Requests that are with the engine."""
        self.moved_at = float("-inf")
        """When a byte of any answer came; may be written directly, for each piece."""

    def began(self, now: float) -> None:
        """A request was sent. Silence begins with the first one: later ones do not end it."""
        if self.in_flight == 0:
            self.moved_at = now
        self.in_flight += 1

    def ended(self) -> None:
        """The answer is complete, broken off, or not wanted any more."""
        self.in_flight -= 1

    def silent_s(self, now: float) -> float:
        """How long nothing has come although something is asked for; 0 while nothing is."""
        return max(0.0, now - self.moved_at) if self.in_flight else 0.0

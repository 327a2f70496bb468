"""How fast a tier delivers, learned from its transfers."""

from __future__ import annotations

FADING = 0.7
"""Weight of a transfer after one more has come: a tier that turns slow is known after two."""


class TransferRate:
    """Bytes over seconds of the newest transfers, latency included."""

    def __init__(self) -> None:
        self._bytes = 0.0
        self._seconds = 0.0
        self._latency_s: float | None = None

    def observe(self, num_bytes: int, seconds: float, first_s: float | None = None) -> None:
        """One transfer. `first_s`: until its first part was there; None: it came in one piece."""
        if num_bytes <= 0 or seconds <= 0.0:
            return
        self._bytes = self._bytes * FADING + num_bytes
        self._seconds = self._seconds * FADING + seconds
        wait_s, shortest_s = seconds if first_s is None else first_s, self._latency_s
        # A shorter wait counts at once, a longer one slowly.
        self._latency_s = wait_s if shortest_s is None else min(wait_s, shortest_s * 1.1)

    @property
    def known(self) -> bool:
        return self._bytes > 0

    @property
    def bytes_per_s(self) -> float:
        """0 while nothing is known."""
        return self._bytes / self._seconds if self.known else 0.0

    @property
    def latency_s(self) -> float:
        return self._latency_s or 0.0

    def seconds(self, num_bytes: int) -> float | None:
        """What such a transfer would take; None while nothing is known."""
        if not self.known:
            return None
        return num_bytes / self.bytes_per_s

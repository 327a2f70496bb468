"""A bounded factor by which expectations are persistently off."""

from __future__ import annotations

import math

FLOOR_S = 0.001
"""What clocks and rounding make of nothing."""

_MAX_STEP = 0.7
"""Of the logarithm: one observation counts as at most twice or half of what was expected."""


class Correction:
    """Moves by the ratio of observed to expected, in logarithms, so that twice and half weigh the
    same. A single outlier moves it little however far out it is; after some observations it moves
    like a median rather than a mean. Keeps two numbers."""

    def __init__(
        self,
        *,
        bound: float,
        ignored: float = 1.0,
        floor_s: float = FLOOR_S,
        gain: float = 0.05,
    ) -> None:
        """`factor` stays within 1/bound and bound, and is 1 while it would be within 1/ignored and
        ignored: what chance alone would make of equals. `floor_s` is added to both sides of a
        ratio: what is as short is made by something else."""
        self._floor_s = floor_s
        self._limit = math.log(bound)
        self._ignored = math.log(ignored)
        self._gain = gain
        self._log = 0.0
        self.observations = 0
        self.factor = 1.0

    def observe(self, expected_s: float, observed_s: float) -> None:
        """`expected_s` as it was without this correction."""
        if not (0.0 <= expected_s < math.inf and 0.0 <= observed_s < math.inf):
            return
        off = math.log(
            (observed_s + self._floor_s) / (expected_s * math.exp(self._log) + self._floor_s)
        )
        self.observations += 1
        gain = max(self._gain, 1.0 / (self.observations + 1))
        moved = self._log + gain * max(-_MAX_STEP, min(_MAX_STEP, off))
        self._log = max(-self._limit, min(self._limit, moved))
        self.factor = math.exp(self._log) if abs(self._log) > self._ignored else 1.0

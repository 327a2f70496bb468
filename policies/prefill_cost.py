"""What prefill costs on one engine, learned from the steps that it ran.

    seconds(step) = base + linear * u + quadratic * a

u: tokens computed in the step; a: positions that they attended to, the sum of context + half of
what is computed, times the tokens computed. Dense layers are linear in u, attention is linear in
a. Fitted by least squares with old observations fading; a coefficient that comes out negative is
left out.
"""

from __future__ import annotations

import itertools
import math

import numpy as np

FADING = 0.98
"""Weight of an observation after one more has come."""

ENOUGH = 3
"""Observations before anything is predicted."""


def attended(context: int, num_tokens: int) -> float:
    """Positions that `num_tokens` computed after `context` others look back on, in all."""
    return num_tokens * (context + num_tokens / 2)


class PrefillCost:
    """Bounded: sums only."""

    def __init__(self) -> None:
        self._moments = np.zeros((3, 3))
        self._targets = np.zeros(3)
        self._observations = 0
        self._coefficients: list[float] | None = None

    def observe(self, num_tokens: int, attended_positions: float, seconds: float) -> None:
        """One step of the engine. What no clock can have measured is left out."""
        if num_tokens <= 0 or not 0.0 < seconds < math.inf:
            return
        if not 0.0 <= attended_positions < math.inf:
            return
        row = np.array([1.0, num_tokens, attended_positions])
        # Relative errors count, so that short steps are as well known as long ones.
        weight = 1.0 / max(seconds, 1e-4) ** 2
        self._moments = self._moments * FADING + weight * np.outer(row, row)
        self._targets = self._targets * FADING + weight * seconds * row
        self._observations += 1
        self._coefficients = None

    def seconds(self, context: int, num_tokens: int) -> float | None:
        """What computing `num_tokens` more after `context` would add to a step; None while too
        little is known."""
        if self._observations < ENOUGH:
            return None
        if self._coefficients is None:
            self._coefficients = non_negative_fit(self._moments, self._targets).tolist()
        _, linear, quadratic = self._coefficients
        return linear * num_tokens + quadratic * attended(context, num_tokens)


def non_negative_fit(moments: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """The best of all least-squares fits whose coefficients are not negative, from their 3 x 3
    moments: with three of them, trying every subset is the plain way."""
    best, best_gain = np.zeros(3), -1.0
    for size in (3, 2, 1):
        for kept in itertools.combinations(range(3), size):
            index = np.array(kept)
            part_moments = moments[np.ix_(index, index)]
            scale = 1.0 / np.sqrt(np.maximum(np.diag(part_moments), 1e-300))
            scaled = part_moments * np.outer(scale, scale) + 1e-9 * np.eye(size)
            part = scale * np.linalg.solve(scaled, scale * targets[index])
            if (part < 0).any():
                continue
            gain = float(2 * part @ targets[index] - part @ part_moments @ part)
            if gain > best_gain * (1 + 1e-9):
                best, best_gain = np.zeros(3), gain
                best[index] = part
    return best

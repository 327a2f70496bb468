"""What a prompt costs to compute, from requests of all sizes.

    seconds(u, context) = base + linear * u + quadratic * u * (context + u / 2)

as in policies/prefill_cost.py, but from whole requests: long and short ones are remembered apart,
so that an hour of short prompts does not wipe out what a long one costs.
"""

from __future__ import annotations

import math

import numpy as np

from policies.prefill_cost import attended, non_negative_fit

DEFAULT_TOKEN_S = 1e-4
"""Of one token while nothing is known: 10,000 tokens a second."""

TRUSTED = 8
"""Observations before it is good enough to judge others by."""

_FADING = 0.95
"""Weight of an observation after another one of its size has come."""
_DOUBT = 0.02
"""Weight of what was assumed before anything was observed."""
_ASSUMED_TOKENS = (256, 4096)
_MAX_SIZE = 32  # octaves of tokens
_OUTLIER = 8.0
"""Observations that are off by more count as off by this."""


class PrefillModel:
    """Bounded: sums of squares per octave of computed tokens."""

    def __init__(self) -> None:
        self._moments = np.zeros((_MAX_SIZE + 1, 3, 3))
        self._targets = np.zeros((_MAX_SIZE + 1, 3))
        self._observations = 0
        self._unfitted = 0
        self._base = 0.0
        self._linear = DEFAULT_TOKEN_S
        self._quadratic = 0.0
        for tokens in _ASSUMED_TOKENS:
            self._add(tokens, attended(0, tokens), tokens * DEFAULT_TOKEN_S, _DOUBT)

    @property
    def observations(self) -> int:
        """How many there were."""
        return self._observations

    def observe(self, num_tokens: int, context: int, seconds: float) -> None:
        """One request: `seconds` from its scheduling to its first token, without loads."""
        if num_tokens < 1 or context < 0 or not 0.0 < seconds < math.inf:
            return
        if self._observations >= TRUSTED:
            expected = self.seconds(num_tokens, context)
            seconds = max(expected / _OUTLIER, min(expected * _OUTLIER, seconds))
        self._add(num_tokens, attended(context, num_tokens), seconds, 1.0)
        self._observations += 1
        self._unfitted += 1
        # A fit takes about 0.2 ms, so often only while little is known.
        if self._unfitted >= min(32, 1 + self._observations // 8):
            self._fit()

    def seconds(self, num_tokens: int, context: int) -> float:
        """Alone on an engine that has nothing else to do."""
        return self._base + self.added_seconds(num_tokens, context)

    def added_seconds(self, num_tokens: int, context: int) -> float:
        """What it adds to an engine that is at work anyway."""
        positions = num_tokens * (context + num_tokens / 2)
        return self._linear * num_tokens + self._quadratic * positions

    def _add(self, num_tokens: int, positions: float, seconds: float, weight: float) -> None:
        row = np.array([1.0, num_tokens, positions])
        # Relative errors count, so that short prompts are as well known as long ones.
        weight /= max(seconds, 1e-4) ** 2
        size = min(_MAX_SIZE, num_tokens.bit_length())
        self._moments[size] = self._moments[size] * _FADING + weight * np.outer(row, row)
        self._targets[size] = self._targets[size] * _FADING + weight * seconds * row

    def _fit(self) -> None:
        self._unfitted = 0
        fit = non_negative_fit(self._moments.sum(axis=0), self._targets.sum(axis=0))
        self._base, self._linear, self._quadratic = fit.tolist()

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
"""Weight of the default rate beside one observation."""
_ASSUMED_TOKENS = (256, 4096)
"""Prompts of which it is assumed: where only short ones were seen, long ones are not free."""
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

    @property
    def observations(self) -> int:
        """How many there were."""
        return self._observations

    def observe(self, num_tokens: int, context: int, seconds: float) -> None:
        """One request: `seconds` from its scheduling to its first token, without loads."""
        if num_tokens < 1 or context < 0 or not 0.0 < seconds < math.inf:
            return
        expected = self.seconds(num_tokens, context)
        if self._observations >= TRUSTED:
            seconds = max(expected / _OUTLIER, min(expected * _OUTLIER, seconds))
        row = np.array([1.0, num_tokens, attended(context, num_tokens)])
        weight = _weight(expected)
        size = min(_MAX_SIZE, num_tokens.bit_length())
        self._moments[size] = self._moments[size] * _FADING + weight * np.outer(row, row)
        self._targets[size] = self._targets[size] * _FADING + weight * seconds * row
        self._observations += 1
        self._unfitted += 1
        # A fit takes about 0.3 ms, so often only while little is known.
        if self._unfitted >= min(32, 1 + self._observations // 8):
            self._fit()

    def seconds(self, num_tokens: int, context: int) -> float:
        """Alone on an engine that has nothing else to do."""
        return self._base + self.added_seconds(num_tokens, context)

    def added_seconds(self, num_tokens: int, context: int) -> float:
        """What it adds to an engine that is at work anyway."""
        positions = num_tokens * (context + num_tokens / 2)
        return self._linear * num_tokens + self._quadratic * positions

    def _fit(self) -> None:
        self._unfitted = 0
        moments, targets = self._moments.sum(axis=0), self._targets.sum(axis=0)
        for tokens in _ASSUMED_TOKENS:
            assumed = tokens * DEFAULT_TOKEN_S
            row = np.array([1.0, tokens, attended(0, tokens)])
            weight = _DOUBT * _weight(max(assumed, self.seconds(tokens, 0)))
            moments += weight * np.outer(row, row)
            targets += weight * assumed * row
        self._base, self._linear, self._quadratic = non_negative_fit(moments, targets).tolist()


def _weight(expected: float) -> float:
    """Relative errors count, so that short prompts are as well known as long ones. Relative to
    what was expected: if it were to what came out, slow ones would count too little."""
    return 1.0 / max(expected, 1e-5) ** 2

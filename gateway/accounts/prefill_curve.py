"""What prefill costs on one replica, learned from the requests that it served.

Cost is close to a + b*u + c*u*(context + u/2) for u computed tokens after `context` reused ones:
dense layers are linear in u, attention grows with what each token looks back on. Here

    seconds(u, context) = cold(u) + c * u * context

`cold` is a monotone line through medians of the newest observations, one knot per half octave of u,
so its own shape (attention among the u tokens, chunked prefill, flat regions where memory traffic
rules) is measured, not assumed. `c` is a median too. Medians keep requests that shared their steps
with neighbours from bending the line. Without a nearby observation there is no prediction.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median

COMPARABLE = 2.0
"""Observations within this factor of the number of tokens asked for count as comparable."""

KNOT_OBSERVATIONS = 32
"""The newest observations that a knot keeps."""

FEW_OBSERVATIONS = 5
FEW_SPREAD = 0.5
"""With fewer observations their spread says little: the error is taken as half of the value."""

_MAX_BIN = 48  # 2**24 tokens
_COLD_SHARE = 0.25  # contexts up to this share of u belong to the cold line
_WARM_OBSERVATIONS = 64
_MIN_WARM = 3
_MAD_TO_SIGMA = 1.4826  # of a normal distribution


@dataclass(frozen=True, slots=True)
class Prediction:
    """Expected prefill time and one standard deviation of a single request around it."""

    prefill_s: float
    error_s: float


@dataclass(frozen=True, slots=True)
class Knot:
    """One point of the cold line."""

    uncached_tokens: float
    """Median of the tokens computed."""
    prefill_s: float
    spread: float
    """Relative: one standard deviation of the observations around the line, at least FEW_SPREAD
    while there are fewer than FEW_OBSERVATIONS."""
    observations: int
    min_tokens: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class _Observation:
    uncached_tokens: int
    context_tokens: int
    prefill_s: float


class PrefillCurve:
    """At most 49 knots of KNOT_OBSERVATIONS observations, whatever the uptime."""

    def __init__(self) -> None:
        self._cold: dict[int, deque[_Observation]] = {}
        self._warm: deque[_Observation] = deque(maxlen=_WARM_OBSERVATIONS)
        self._attention: Prediction | None = None  # c: of one token looking back on one more
        self._knots: list[Knot] = []
        self._num_observed = 0
        self._num_unfitted = 0

    def observe(self, uncached_tokens: int, context_tokens: int, prefill_s: float) -> None:
        """`prefill_s` as the engine measured it, without queueing and loading."""
        if uncached_tokens < 1 or context_tokens < 0 or prefill_s <= 0:
            return
        observation = _Observation(uncached_tokens, context_tokens, prefill_s)
        if context_tokens <= _COLD_SHARE * uncached_tokens:
            position = min(_MAX_BIN, int(2 * math.log2(uncached_tokens)))
            self._cold.setdefault(position, deque(maxlen=KNOT_OBSERVATIONS)).append(observation)
        else:
            self._warm.append(observation)
        self._num_observed += 1
        self._num_unfitted += 1

    def predict(self, uncached_tokens: int, context_tokens: int = 0) -> Prediction | None:
        """None when no comparable request was observed: never a guess."""
        self._fit_when_stale()
        cold = _on_line(self._knots, uncached_tokens)
        if cold is None or context_tokens == 0:
            return cold
        if self._attention is None:
            return None
        pairs = uncached_tokens * context_tokens
        return Prediction(
            cold.prefill_s + self._attention.prefill_s * pairs,
            cold.error_s + self._attention.error_s * pairs,
        )

    def knots(self) -> Sequence[Knot]:
        """The cold line, ascending in tokens."""
        self._fit()
        return tuple(self._knots)

    def _fit_when_stale(self) -> None:
        """Often while little is known, then once in 64 observations: a fit of a full curve takes
        about 0.6 ms, a prediction 5 us."""
        if self._num_unfitted > min(64, self._num_observed // 8):
            self._fit()

    def _fit(self) -> None:
        if self._num_unfitted == 0:
            return
        self._num_unfitted = 0
        bins = [self._cold[position] for position in sorted(self._cold)]
        attention_s = self._attention.prefill_s if self._attention else 0.0
        self._knots = _monotone([_knot(observations, attention_s) for observations in bins])
        self._attention = _attention(self._knots, self._warm)


def _knot(observations: Sequence[_Observation], attention_s: float) -> Knot:
    tokens = [o.uncached_tokens for o in observations]
    # Per token, since lengths within half an octave differ by far more than the noise does.
    per_token_s = [
        max(0.0, o.prefill_s / o.uncached_tokens - attention_s * o.context_tokens)
        for o in observations
    ]
    middle_tokens, middle_s = median(tokens), median(per_token_s)
    spread = 0.0
    if middle_s > 0:
        spread = _MAD_TO_SIGMA * median(abs(s / middle_s - 1) for s in per_token_s)
    if len(observations) < FEW_OBSERVATIONS:
        spread = max(spread, FEW_SPREAD)
    return Knot(
        uncached_tokens=middle_tokens,
        prefill_s=middle_s * middle_tokens,
        spread=spread,
        observations=len(observations),
        min_tokens=min(tokens),
        max_tokens=max(tokens),
    )


def _monotone(knots: Sequence[Knot]) -> list[Knot]:
    """Pool adjacent violators: the non-decreasing line that is nearest to the medians, weighted by
    observations. What pooling moved a knot by is added to its spread."""
    pools: list[tuple[float, int, list[Knot]]] = []  # value, weight, members
    for knot in knots:
        value, weight, members = knot.prefill_s, knot.observations, [knot]
        while pools and pools[-1][0] > value:
            before, count, earlier = pools.pop()
            value = (before * count + value * weight) / (count + weight)
            weight, members = count + weight, earlier + members
        pools.append((value, weight, members))
    return [_moved(knot, value) for value, _, members in pools for knot in members]


def _moved(knot: Knot, prefill_s: float) -> Knot:
    if knot.prefill_s == prefill_s:
        return knot
    shift = abs(knot.prefill_s / prefill_s - 1)
    return replace(knot, prefill_s=prefill_s, spread=knot.spread + shift)


def _on_line(knots: Sequence[Knot], tokens: int) -> Prediction | None:
    nearest: Knot | None = None
    for knot in knots:
        if knot.max_tokens * COMPARABLE < tokens or knot.min_tokens > tokens * COMPARABLE:
            continue
        if nearest is None or _distance(knot, tokens) < _distance(nearest, tokens):
            nearest = knot
    if nearest is None:
        return None
    position = bisect_right([knot.uncached_tokens for knot in knots], tokens)
    if position == 0:
        prefill_s = _below(knots, tokens)
    elif position == len(knots):
        prefill_s = _above(knots, tokens)
    else:
        prefill_s = _between(knots[position - 1], knots[position], tokens)
        return Prediction(prefill_s, prefill_s * nearest.spread)
    # Off the ends the whole step away from the nearest knot is in doubt as well.
    return Prediction(prefill_s, prefill_s * nearest.spread + abs(prefill_s - nearest.prefill_s))


def _distance(knot: Knot, tokens: int) -> float:
    return abs(math.log(knot.uncached_tokens / tokens))


def _between(left: Knot, right: Knot, tokens: float) -> float:
    share = (tokens - left.uncached_tokens) / (right.uncached_tokens - left.uncached_tokens)
    return left.prefill_s + share * (right.prefill_s - left.prefill_s)


def _below(knots: Sequence[Knot], tokens: int) -> float:
    """Under the first knot: in proportion, or along the first segment, whichever is less, so that
    savings come out too small rather than too large."""
    first = knots[0]
    proportional = first.prefill_s * tokens / first.uncached_tokens
    if len(knots) == 1:
        return proportional
    return max(0.0, min(proportional, _between(first, knots[1], tokens)))


def _above(knots: Sequence[Knot], tokens: int) -> float:
    """Over the last knot: along the last segment, at most in proportion; flat behind a single one
    (cost does not fall with tokens, and more is not known)."""
    last = knots[-1]
    if len(knots) == 1:
        return last.prefill_s
    proportional = last.prefill_s * tokens / last.uncached_tokens
    return min(proportional, _between(knots[-2], last, tokens))


def _attention(knots: Sequence[Knot], warm: Iterable[_Observation]) -> Prediction | None:
    """What is left of warm requests when the cold line is taken off, per token pair."""
    slopes = []
    for w in warm:
        cold = _on_line(knots, w.uncached_tokens)
        if cold is not None:
            slopes.append((w.prefill_s - cold.prefill_s) / (w.uncached_tokens * w.context_tokens))
    if len(slopes) < _MIN_WARM:
        return None
    middle = median(slopes)
    spread = _MAD_TO_SIGMA * median(abs(slope - middle) for slope in slopes)
    return Prediction(max(0.0, middle), spread)

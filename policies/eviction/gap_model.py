"""How soon blocks are used again: learned from the traffic, category by category.

A category (a curve) has, per bucket of age, how long its tokens were watched there and how many of
them were used again meanwhile; their ratio is the rate of reuse at that age. What is being watched
still counts up to the present moment, and what leaves the view unused counts as watched until then:
nothing is assumed of it (the usual estimator for censored survival data). Where a category has seen
little it follows the category above it.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from dataclasses import dataclass

EDGES_S = (0.0, *(0.7 * 2 ** (k / 2) for k in range(36)))
"""Where the buckets of age begin: 0, 0.7 s, 1 s, 1.4 s, 2 s ... 36 h."""

BUCKETS = len(EDGES_S)

_WIDTHS_S = (*(b - a for a, b in itertools.pairwise(EDGES_S)), 1e6)

GUESS = 0.03
"""Rate times age where nothing is known: reuse grows less likely with age, as LRU takes it."""

TRUST_PROMPTS = 4.0
"""So many average prompts must have been reused in a category for it to count as much as the one
above it: the blocks of one prompt are used together and say one thing."""

GUESS_PROMPTS = 0.2
"""So many count as much as the guess."""

MIN_REFIT, MAX_REFIT = 4, 64
"""Requests between two fits; more often as long as little is known."""

PROMPTS_AVERAGED = 256

MEMORY_REQUESTS = 20_000
"""After so many requests what was learned counts half."""


def bucket_of(age_s: float) -> int:
    """The bucket of an age."""
    return max(0, bisect_right(EDGES_S, age_s) - 1)


class Curve:
    """One category. `worth[k]`: what holding a token of age bucket k yields at best, in reused
    tokens per second."""

    __slots__ = (
        "_entries",
        "_rates",
        "_reused",
        "_watched",
        "_watching",
        "above",
        "below",
        "worth",
    )

    def __init__(self, above: Curve | None) -> None:
        self.above = above
        self.below: list[Curve] = []
        if above is not None:
            above.below.append(self)
        self._reused = [0.0] * BUCKETS
        self._watched = [0.0] * BUCKETS
        """Token-seconds."""
        self._watching = [0.0] * BUCKETS
        """Tokens that are there now."""
        self._entries = [0.0] * BUCKETS
        """The sum of tokens times the moment since when they are there."""
        self._rates: list[float] = _GUESSES if above is None else above._rates
        self.worth: list[float] = worths(self._rates)

    def enter(self, bucket: int, since_s: float, tokens: float) -> None:
        """Tokens are in a bucket from a moment on."""
        self._watching[bucket] += tokens
        self._entries[bucket] += tokens * since_s

    def unwatch(self, bucket: int, token_seconds: float) -> None:
        """They came later than the moment that `enter` was told."""
        self._watched[bucket] -= token_seconds

    def leave(self, bucket: int, since_s: float, until_s: float, tokens: float) -> None:
        """They are not any more: too old for it, or out of view."""
        self._watching[bucket] -= tokens
        self._entries[bucket] -= tokens * since_s
        self._watched[bucket] += tokens * max(0.0, until_s - since_s)

    def skip(self, bucket: int, tokens: float) -> None:
        """They passed through all buckets before this one."""
        for k in range(bucket):
            self._watched[k] += tokens * _WIDTHS_S[k]

    def reuse(self, bucket: int, tokens: float) -> None:
        """Tokens were used again in a bucket."""
        self._reused[bucket] += tokens

    def forget(self, share: float) -> None:
        """What was seen counts `share` of what it did."""
        self._reused = [each * share for each in self._reused]
        self._watched = [each * share for each in self._watched]

    def seen(self, now: float) -> _Sums:
        """Of this category and all below it."""
        reused = list(self._reused)
        watched = [
            done + max(0.0, tokens * now - entries)
            for done, tokens, entries in zip(
                self._watched, self._watching, self._entries, strict=True
            )
        ]
        sums = [curve.seen(now) for curve in self.below]
        for each in sums:
            reused = [a + b for a, b in zip(reused, each.reused, strict=True)]
            watched = [a + b for a, b in zip(watched, each.watched, strict=True)]
        return _Sums(self, reused, watched, sums)

    def fit(self, sums: _Sums, prompt_tokens: float) -> None:
        """New rates, here and below."""
        above = self.above
        trust = prompt_tokens * (GUESS_PROMPTS if above is None else TRUST_PROMPTS)
        expected = _GUESSES if above is None else above._rates
        self._rates = [
            (reused + trust) / (watched + trust / rate)
            for reused, watched, rate in zip(sums.reused, sums.watched, expected, strict=True)
        ]
        self.worth = worths(self._rates)
        for each in sums.below:
            each.curve.fit(each, prompt_tokens)


@dataclass(frozen=True, slots=True)
class _Sums:
    curve: Curve
    reused: list[float]
    watched: list[float]
    below: list[_Sums]


_GUESSES = [2 * GUESS / (2 * edge + width) for edge, width in zip(EDGES_S, _WIDTHS_S, strict=True)]


@dataclass(slots=True)
class _Stretch:
    """Ages that are best held to the end once they are begun."""

    chance: float
    """Of reuse within them."""
    duration_s: float
    """Expected, until reuse or their end."""
    survives: float

    @property
    def worth(self) -> float:
        return self.chance / self.duration_s


def worths(rates: list[float]) -> list[float]:
    """Per bucket the best yield of holding a token from there on: over all moments to give up, the
    largest chance of reuse until then by the time that it is expected to take (Gittins index,
    J. Gittins 1979). Where the rate only falls with age it is the rate itself and the order is
    LRU's; a rate that rises later (the answer takes its time, then the tool) counts already now."""
    stretches: list[_Stretch] = []
    found = [0.0] * len(rates)
    for k in range(len(rates) - 1, -1, -1):
        chance = -math.expm1(-rates[k] * _WIDTHS_S[k])
        now = _Stretch(chance, chance / rates[k], 1.0 - chance)
        while stretches and stretches[-1].worth > now.worth:
            later = stretches.pop()
            now.chance += now.survives * later.chance
            now.duration_s += now.survives * later.duration_s
            now.survives *= later.survives
        stretches.append(now)
        found[k] = now.worth
    return found


class GapModel:
    """All categories, as paths from the general to the special."""

    def __init__(self) -> None:
        self._curves: dict[tuple[str, ...], Curve] = {}
        self._requests = 0
        self._prompt_tokens = 1.0
        """Of an average prompt."""
        self._next_fit = MIN_REFIT
        self.fits = 0

    def curve(self, path: tuple[str, ...]) -> Curve:
        """The category of that path; what nobody asked for before begins with what is known of
        the one above it."""
        curve = self._curves.get(path)
        if curve is None:
            above = self.curve(path[:-1]) if len(path) > 1 else None
            curve = self._curves[path] = Curve(above)
        return curve

    def requested(self, now: float, prompt_tokens: int) -> bool:
        """One more request came. True when `worth` has changed."""
        self._requests += 1
        weight = 1 / min(self._requests, PROMPTS_AVERAGED)
        self._prompt_tokens += weight * (max(1, prompt_tokens) - self._prompt_tokens)
        if self._requests < self._next_fit:
            return False
        pause = min(MAX_REFIT, max(MIN_REFIT, self._requests // 16))
        self._next_fit = self._requests + pause
        share = 0.5 ** (pause / MEMORY_REQUESTS)
        for curve in self._curves.values():
            curve.forget(share)
        for curve in self._curves.values():
            if curve.above is None:
                curve.fit(curve.seen(now), self._prompt_tokens)
        self.fits += 1
        return True

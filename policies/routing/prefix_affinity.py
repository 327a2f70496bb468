"""To whom holds the most of the prompt, unless it is overloaded.

The rules are those of the cache-aware load balancer of SGLang (its router's balance and cache
thresholds), with exact prefixes instead of guessed ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from policies.base import Settings
from policies.routing.base import Candidate, Decision, RouteRequest, Score
from policies.routing.hash_ring import HashRing
from policies.routing.rotation import Rotation

_VIRTUAL_NODES = 128


class PrefixAffinityRouting(Settings):
    """The longest prefix; by load among equals. Prompts that nobody knows go by the hash of their
    start, so that equal ones meet."""

    kind: Literal["prefix_affinity"] = "prefix_affinity"
    cold_below: float = Field(default=0.1, ge=0.0, le=1.0)
    """Prompts of which nobody holds this share count as unknown."""
    balance_abs: int = Field(default=8, ge=0)
    """A replica gives way when it has this many requests more than the one with the fewest ..."""
    balance_rel: float = Field(default=1.5, ge=1.0)
    """... and this many times as many."""

    def router(self) -> PrefixAffinityRouter:
        """A router with nothing seen yet."""
        return PrefixAffinityRouter(self)


class PrefixAffinityRouter:
    """Keeps the ring and whose turn it was. The score is the share of the prompt that would have
    to be computed; 1 more where the replica gives way."""

    def __init__(self, settings: PrefixAffinityRouting) -> None:
        self._settings = settings
        self._ring = HashRing(_VIRTUAL_NODES)
        self._rotation = Rotation()

    def decide(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Decision:
        """See Router."""
        tokens = max(1, request.num_tokens)
        longest = max(each.reused_tokens for each in candidates)
        cold = longest == 0 or longest < self._settings.cold_below * tokens
        if cold and request.prefix:
            named = {each.replica: each for each in candidates}
            ordered = [named[replica] for replica in self._ring.order(request.prefix, named)]
            scores = [Score(each, 1.0) for each in ordered]
        else:
            ordered = sorted(self._rotation.in_turn(candidates), key=lambda each: each.load)
            scores = [Score(each, 1.0 - each.reused_tokens / tokens) for each in ordered]
            scores.sort(key=lambda score: score.score)
        preferred = scores[0].candidate
        ranked = self._with_way_given(scores)
        self._rotation.chose(ranked[0].candidate)
        if ranked[0].candidate is not preferred:
            reason = "its replica is overloaded"
        else:
            reason = "hash of an unknown prefix" if cold else "longest prefix"
        return Decision("prefix_affinity", tuple(ranked), reason)

    def _with_way_given(self, scores: list[Score]) -> list[Score]:
        """Overloaded ones last, by load."""
        fewest = min(score.candidate.running + score.candidate.waiting for score in scores)
        limit = max(fewest + self._settings.balance_abs, fewest * self._settings.balance_rel)
        kept, gave_way = [], []
        for score in scores:
            each = score.candidate
            if each.running + each.waiting > limit:
                gave_way.append(Score(each, score.score + 1.0))
            else:
                kept.append(score)
        gave_way.sort(key=lambda score: score.candidate.load)
        return kept + gave_way

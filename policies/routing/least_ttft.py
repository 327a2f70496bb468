"""To where the first token is expected first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from pydantic import Field

from policies.base import Duration, Settings
from policies.routing.base import Candidate, Decision, RouteRequest, Score
from policies.routing.rotation import Rotation


class LeastTtftRouting(Settings):
    """The default: queue, loads and computing together. A hot prefix spreads when waiting for its
    replica costs more than computing it again elsewhere."""

    kind: Literal["least_ttft"] = "least_ttft"
    recompute_weight: float = Field(default=3.0, ge=0.0, le=10.0)
    """What a second of computing counts beyond itself: it keeps others waiting, and its blocks
    push out others'. 0: only this request matters; more: prefixes spread later."""
    tie_share: float = Field(default=0.05, ge=0.0, le=1.0)
    """Replicas that are worse than the best by less than this share ..."""
    tie: Duration = Field(default=0.001, ge=0.0)
    """... or by less than this are equal: who holds most of the prompt comes first, then free KV
    memory, then load, then turns decide."""

    def router(self) -> LeastTtftRouter:
        """A router with nothing seen yet."""
        return LeastTtftRouter(self)


class LeastTtftRouter:
    """Keeps whose turn it was. The score is in seconds."""

    def __init__(self, settings: LeastTtftRouting) -> None:
        self._settings = settings
        self._rotation = Rotation()

    def decide(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Decision:
        """See Router."""
        weight = self._settings.recompute_weight
        scores = [
            Score(each, each.ttft_s + weight * each.prefill_s)
            for each in self._rotation.in_turn(candidates)
        ]
        best = min(scores, key=_by_room_and_score)
        limit = best.score + max(self._settings.tie, self._settings.tie_share * best.score)
        full = is_full(best.candidate)
        ties = [each for each in scores if each.score <= limit and is_full(each.candidate) == full]
        reason = "least expected time to first token"
        if len(ties) > 1:
            reason = "equal times, more room"
            ties.sort(key=_comfort(request, candidates))
        equal = {each.candidate.replica for each in ties}
        rest = [each for each in scores if each.candidate.replica not in equal]
        rest.sort(key=_by_room_and_score)
        self._rotation.chose(ties[0].candidate)
        return Decision("least_ttft", (*ties, *rest), reason)


def is_full(candidate: Candidate) -> bool:
    """A request would wait for a place with it: how long, nobody knows."""
    return candidate.load >= 1.0


def _by_room_and_score(score: Score) -> tuple[bool, float]:
    return is_full(score.candidate), score.score


def _comfort(
    request: RouteRequest, candidates: Sequence[Candidate]
) -> Callable[[Score], tuple[bool, float, float]]:
    """What decides among equals; less is better. Who holds more than half of the prompt: where
    computing is thought to cost next to nothing, it is better not done. Free KV memory in tenths,
    where all say it: a smaller difference does not matter."""
    known = all(each.kv_free is not None for each in candidates)

    def key(score: Score) -> tuple[bool, float, float]:
        candidate = score.candidate
        free = candidate.kv_free if known else None
        lacks = 2 * candidate.reused_tokens <= request.num_tokens
        return lacks, -round(free or 0.0, 1), candidate.load

    return key

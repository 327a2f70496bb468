"""To whom has the least to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from policies.base import Settings
from policies.routing.base import Candidate, Decision, RouteRequest, Score
from policies.routing.rotation import Rotation


class LeastLoadedRouting(Settings):
    """The fewest requests, in units of capacity, of all replicas; equals take turns."""

    kind: Literal["least_loaded"] = "least_loaded"

    def router(self) -> LeastLoadedRouter:
        """A router with nothing seen yet."""
        return LeastLoadedRouter()


class LeastLoadedRouter:
    """Keeps whose turn it was. The score is the load."""

    def __init__(self) -> None:
        self._rotation = Rotation()

    def decide(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Decision:
        """See Router."""
        scores = [Score(each, each.load) for each in self._rotation.in_turn(candidates)]
        scores.sort(key=lambda score: score.score)
        self._rotation.chose(scores[0].candidate)
        return Decision("least_loaded", tuple(scores), "least load")

"""To each in turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from policies.base import Settings
from policies.routing.base import Candidate, Decision, RouteRequest, Score
from policies.routing.rotation import Rotation


class RoundRobinRouting(Settings):
    """Knows nothing of caches or load: what others are compared with."""

    kind: Literal["round_robin"] = "round_robin"

    def router(self) -> RoundRobinRouter:
        """A router with nothing seen yet."""
        return RoundRobinRouter()


class RoundRobinRouter:
    """Keeps whose turn it was. The score is the place in line."""

    def __init__(self) -> None:
        self._rotation = Rotation()

    def decide(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Decision:
        """See Router."""
        ranked = self._rotation.in_turn(candidates)
        self._rotation.chose(ranked[0])
        scores = tuple(Score(each, float(place)) for place, each in enumerate(ranked))
        return Decision("round_robin", scores, "its turn")

"""To whom has the least to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from policies.base import Settings
from policies.routing.base import Candidate, Decision, RouteRequest, Score


class LeastLoadedRouting(Settings):
    """The fewest requests, in units of capacity."""

    kind: Literal["least_loaded"] = "least_loaded"

    def router(self) -> LeastLoadedRouter:
        """A router with nothing seen yet."""
        return LeastLoadedRouter()


class LeastLoadedRouter:
    """Keeps nothing."""

    def decide(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Decision:
        ranked = sorted((Score(each, each.load) for each in candidates), key=lambda s: s.score)
        return Decision("least_loaded", tuple(ranked), "least load")

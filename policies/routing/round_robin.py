"""To each in turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from policies.base import Settings
from policies.routing.base import Candidate, Decision, RouteRequest, Score


class RoundRobinRouting(Settings):
    """Knows nothing of caches or load."""

    kind: Literal["round_robin"] = "round_robin"

    def router(self) -> RoundRobinRouter:
        """A router with nothing seen yet."""
        return RoundRobinRouter()


class RoundRobinRouter:
    """Keeps a counter."""

    def decide(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Decision:
        ranked = sorted((Score(each, 0.0) for each in candidates), key=lambda s: s.score)
        return Decision("round_robin", tuple(ranked), "its turn")

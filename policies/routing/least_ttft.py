"""To where the first token is expected first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from policies.base import Settings
from policies.routing.base import Candidate, Decision, RouteRequest, Score


class LeastTtftRouting(Settings):
    """The default."""

    kind: Literal["least_ttft"] = "least_ttft"

    def router(self) -> LeastTtftRouter:
        """A router with nothing seen yet."""
        return LeastTtftRouter()


class LeastTtftRouter:
    """Keeps nothing."""

    def decide(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Decision:
        ranked = sorted((Score(each, each.ttft_s) for each in candidates), key=lambda s: s.score)
        return Decision("least_ttft", tuple(ranked), "least expected time to first token")

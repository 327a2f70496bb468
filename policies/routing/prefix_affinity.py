"""To whom holds the most of the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from policies.base import Settings
from policies.routing.base import Candidate, Decision, RouteRequest, Score


class PrefixAffinityRouting(Settings):
    """The longest prefix, whatever the load."""

    kind: Literal["prefix_affinity"] = "prefix_affinity"

    def router(self) -> PrefixAffinityRouter:
        """A router with nothing seen yet."""
        return PrefixAffinityRouter()


class PrefixAffinityRouter:
    """Keeps nothing."""

    def decide(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Decision:
        ranked = sorted(
            (Score(each, -each.reused_tokens) for each in candidates), key=lambda s: s.score
        )
        return Decision("prefix_affinity", tuple(ranked), "longest prefix")

"""A session stays where it began."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from policies.base import Settings
from policies.routing.base import Candidate, Decision, RouteRequest, Score


class SessionAffinityRouting(Settings):
    """Consistent hashing with bounded load."""

    kind: Literal["session_affinity"] = "session_affinity"

    def router(self) -> SessionAffinityRouter:
        """A router with nothing seen yet."""
        return SessionAffinityRouter()


class SessionAffinityRouter:
    """Keeps a ring."""

    def decide(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Decision:
        ranked = sorted((Score(each, 0.0) for each in candidates), key=lambda s: s.score)
        return Decision("session_affinity", tuple(ranked), "its session")

"""A session stays where it began.

Consistent hashing with bounded loads: Mirrokni, Thorup, Zadimoghaddam 2016, "Consistent Hashing
with Bounded Loads". No replica is given more than load_factor times its share of all requests; a
key whose replica is full goes on along the ring.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from policies.base import Settings
from policies.routing.base import Candidate, Decision, RouteRequest, Score
from policies.routing.hash_ring import HashRing
from policies.routing.rotation import Rotation


class SessionAffinityRouting(Settings):
    """By session, else by the start of the prompt, else in turn."""

    kind: Literal["session_affinity"] = "session_affinity"
    load_factor: float = Field(default=1.25, gt=1.0, le=100.0)
    """A replica gets at most so many times its share of the requests, rounded up."""
    virtual_nodes: int = Field(default=128, ge=1, le=1024)
    """Points of each replica on the ring: more spread sessions more evenly."""

    def router(self) -> SessionAffinityRouter:
        """A router with nothing seen yet."""
        return SessionAffinityRouter(self)


class SessionAffinityRouter:
    """Keeps the ring. The score is the place along it, those with room first."""

    def __init__(self, settings: SessionAffinityRouting) -> None:
        self._load_factor = settings.load_factor
        self._ring = HashRing(settings.virtual_nodes)
        self._rotation = Rotation()

    def decide(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Decision:
        """See Router."""
        ordered, reason = self._ordered(request, candidates)
        room = _rooms(candidates, self._load_factor)
        ranked = [each for each in ordered if each.replica in room]
        if ranked[0] is not ordered[0]:
            reason += ", its replica is full"
        ranked += [each for each in ordered if each.replica not in room]
        self._rotation.chose(ranked[0])
        scores = tuple(Score(each, float(place)) for place, each in enumerate(ranked))
        return Decision("session_affinity", scores, reason)

    def _ordered(
        self, request: RouteRequest, candidates: Sequence[Candidate]
    ) -> tuple[list[Candidate], str]:
        if request.session:
            # A session may be named like a prefix; their keys must not meet.
            key, reason = b"session " + request.session.encode(), "its session"
        elif request.prefix:
            key, reason = b"prefix " + request.prefix, "its prefix"
        else:
            return self._rotation.in_turn(candidates), "its turn"
        named = {each.replica: each for each in candidates}
        return [named[replica] for replica in self._ring.order(key, named)], reason


def _rooms(candidates: Sequence[Candidate], load_factor: float) -> set[str]:
    """Replicas that may take one more. At least one: all bounds together exceed all requests."""
    requests = 1 + sum(each.running + each.waiting for each in candidates)
    capacity = sum(max(1, each.capacity) for each in candidates)
    per_place = load_factor * requests / capacity
    return {
        each.replica
        for each in candidates
        if each.running + each.waiting < math.ceil(per_place * max(1, each.capacity))
    }

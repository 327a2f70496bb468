"""Routing policies. Add one: a class with a `kind` and a `router()`, its name here, its tests."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from policies.routing.base import Candidate, Decision, Evidence, Router, RouteRequest, Score
from policies.routing.least_loaded import LeastLoadedRouting
from policies.routing.least_ttft import LeastTtftRouting
from policies.routing.prefix_affinity import PrefixAffinityRouting
from policies.routing.round_robin import RoundRobinRouting
from policies.routing.session_affinity import SessionAffinityRouting

Routing = Annotated[
    LeastTtftRouting
    | RoundRobinRouting
    | LeastLoadedRouting
    | SessionAffinityRouting
    | PrefixAffinityRouting,
    Field(discriminator="kind"),
]

__all__ = [
    "Candidate",
    "Decision",
    "Evidence",
    "LeastLoadedRouting",
    "LeastTtftRouting",
    "PrefixAffinityRouting",
    "RoundRobinRouting",
    "RouteRequest",
    "Router",
    "Routing",
    "Score",
    "SessionAffinityRouting",
]

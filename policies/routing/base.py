"""Routing: which replica answers a request. Pure; the gateway brings what is known as values."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Evidence(enum.StrEnum):
    """What a decision knew about who holds the prompt's blocks."""

    EXACT = "exact"
    """From the KV events of the replica and its store, without a gap."""
    APPROXIMATE = "approximate"
    """From what was sent where, or from events that may be behind."""
    FALLBACK = "fallback"
    """Nothing: the prompt could not be rendered."""


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """What of a request a routing policy may know."""

    num_tokens: int
    """Of the prompt; 0 where it is not known."""
    session: str
    """Whose conversation it is, unique among tenants; empty where nothing says it."""
    prefix: bytes
    """Names the start of the prompt: equal for prompts that could share blocks; empty where it is
    not known."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica that could answer, as it stands for this request."""

    replica: str
    running: int
    """Requests that it works on, ours and those of others as far as they are known."""
    waiting: int
    """Requests that wait for it, here and in the engine."""
    capacity: int
    """Requests that may be with it at a time; less while it is new."""
    device_tokens: int
    """Tokens of the prompt that its own cache holds, or will when it is free."""
    stored_tokens: int
    """Tokens beyond those that its store can load."""
    queue_s: float
    """Expected time until the engine begins with it."""
    load_s: float
    """Expected time to load the stored tokens."""
    prefill_s: float
    """Expected time to compute the rest of the prompt."""
    kv_free: float | None
    """Share of its KV memory that is free, 0 to 1; None where it does not say."""
    evidence: Evidence

    @property
    def ttft_s(self) -> float:
        """Expected time to first token."""
        return self.queue_s + self.load_s + self.prefill_s

    @property
    def reused_tokens(self) -> int:
        """Tokens that it would not compute."""
        return self.device_tokens + self.stored_tokens

    @property
    def load(self) -> float:
        """Requests with it or waiting for it, in units of its capacity."""
        return (self.running + self.waiting) / max(1, self.capacity)


@dataclass(frozen=True, slots=True)
class Score:
    """A candidate and what the policy made of it; lower is better."""

    candidate: Candidate
    score: float


@dataclass(frozen=True, slots=True)
class Decision:
    """All candidates, best first, and why the first one is."""

    kind: str
    """Of the policy."""
    ranking: tuple[Score, ...]
    """At least one. The next ones are asked where the first cannot answer."""
    reason: str
    """A few words, the same for equal reasons: they are counted."""

    @property
    def best(self) -> Candidate:
        return self.ranking[0].candidate


class Router(Protocol):
    """A routing policy at work. One for all requests of a gateway; may keep bounded state."""

    def decide(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Decision:
        """`candidates` is not empty and each id stands once. O(candidates), no I/O."""

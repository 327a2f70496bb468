"""What a replay measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TierReport:
    """One tier, after the warm-up."""

    name: str
    capacity_bytes: int
    used_bytes: int
    """At the end."""
    hit_tokens: int
    """Served from here and not from a tier above."""
    written_bytes: int
    """That came in from the tier above; memory: that was computed or came up."""
    read_bytes: int
    """That went up into memory."""
    evicted_blocks: int
    refused_blocks: int
    """That were computed, or evicted above, and not let in: by admission or for want of room."""


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """One policy at one capacity, after the warm-up."""

    policy: str
    capacity_tokens: int
    """Of all tiers together."""
    requests: int
    hit_requests: int
    """That reused one block or more."""
    input_tokens: int
    hit_tokens: int
    prefill_s: float
    """What prefill would take without reuse."""
    saved_s: float
    """Of it, by reuse."""
    replay_s: float
    """Processor time of the replay itself, warm-up included."""
    replayed_blocks: int
    tiers: tuple[TierReport, ...]

    @property
    def token_hit_rate(self) -> float:
        return self.hit_tokens / self.input_tokens if self.input_tokens else 0.0

    @property
    def request_hit_rate(self) -> float:
        return self.hit_requests / self.requests if self.requests else 0.0

    @property
    def moved_bytes(self) -> int:
        """Between tiers, both ways."""
        return sum(tier.written_bytes + tier.read_bytes for tier in self.tiers[1:])

    @property
    def evicted_blocks(self) -> int:
        return sum(tier.evicted_blocks for tier in self.tiers)

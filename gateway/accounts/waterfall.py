"""Where the tokens of one prompt went: each token stands in exactly one step."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.accounts.record import PromptTokens


@dataclass(frozen=True, slots=True)
class Waterfall:
    """never_seen + evicted + elsewhere + not_delivered + delivered == total, in tokens."""

    total: int
    never_seen: int
    evicted: int
    """Resident once, resident nowhere any more."""
    elsewhere: int
    """Resident, but not on the path that was chosen."""
    not_delivered: int
    """Resident on the path, yet computed again."""
    device: int
    memory: int
    disk: int
    redis: int
    unpredicted: int
    """Part of delivered: delivered although the index knew of no such block on the path."""
    unattributed: int
    """Part of device: it may have come from the store."""

    @property
    def delivered(self) -> int:
        return self.device + self.memory + self.disk + self.redis

    @property
    def uncached(self) -> int:
        """Tokens that went through prefill."""
        return self.total - self.delivered


def waterfall(prompt: PromptTokens) -> Waterfall:
    """What was delivered was captured, available and seen, whatever the index believed, and no
    step is longer than the prompt: so the steps always add up to the total."""
    delivered = prompt.delivered
    total = max(prompt.total, delivered)
    captured = min(max(prompt.captured, delivered), total)
    available = min(max(prompt.available, captured), total)
    seen = min(max(prompt.seen, available), total)
    return Waterfall(
        total=total,
        never_seen=total - seen,
        evicted=seen - available,
        elsewhere=available - captured,
        not_delivered=captured - delivered,
        device=prompt.delivered_device,
        memory=prompt.delivered_memory,
        disk=prompt.delivered_disk,
        redis=prompt.delivered_redis,
        unpredicted=max(0, delivered - prompt.captured),
        unattributed=prompt.unattributed,
    )

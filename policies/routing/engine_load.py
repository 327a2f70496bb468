"""What an engine says of its own load."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """One look at its gauges; the requests of others are in it."""

    running: int
    """Requests that are scheduled."""
    waiting: int
    kv_free: float | None = None
    """Share of its KV memory that no running request holds, 0 to 1; None where it does not say."""
    kv_tokens: int | None = None
    """Tokens that its KV memory holds in all; None where it does not say."""

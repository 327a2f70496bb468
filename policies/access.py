"""What a policy may know of the request that used a block last.

An engine knows token ids. A gateway knows whose request it was, which turn of which session, and
how its answer ended: those are the facts from which reuse can be predicted.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class Stop(enum.StrEnum):
    """How an answer ended. UNKNOWN while it runs, and where nobody told."""

    UNKNOWN = "unknown"
    END_TURN = "end_turn"
    """It is a person's turn now."""
    TOOL_USE = "tool_use"
    """A program runs the tool and asks again."""
    LENGTH = "length"
    CANCELLED = "cancelled"


DEFAULT_PRIORITY = 50


@dataclass(frozen=True, slots=True)
class Retention:
    """What the retention rules say of a request's blocks; it holds on top of any eviction."""

    ttl_s: float | None = None
    """After the last use; then they go first. None: no limit."""
    priority: int = DEFAULT_PRIORITY
    """0 to 100; lower ones go first."""
    pin: bool = False
    """They do not go at all until their ttl is over, within the budget for pins."""


PLAIN = Retention()


@dataclass(slots=True)
class Access:
    """One request. All blocks that it was the last to use share this object, so what becomes known
    later (its `stop`) is known for all of them. Texts are empty where nothing is known."""

    time_s: float = 0.0
    """When it came, on the clock of whoever owns the tier."""
    tenant: str = ""
    model: str = ""
    session: str = ""
    turn: int = 0
    """Requests of its session before it, as far as known."""
    prefix: str = ""
    """Name that the client gave its prefix (prompt_cache_key)."""
    num_tokens: int = 0
    """Of its prompt."""
    output_tokens: int = 0
    """Of its answer, once it has ended."""
    stop: Stop = Stop.UNKNOWN
    ended_s: float | None = None
    """When its answer ended, on the same clock; None while it runs and where nobody told."""
    retention: Retention = field(default=PLAIN)


NO_ACCESS = Access()
"""Of blocks about whose use nothing is known. Never changed."""

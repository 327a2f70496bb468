"""What a request shows to get a place."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ticket:
    """Whose request it is that asks for a place, and how urgent it is."""

    tenant: str
    weight: float = 1.0
    """The tenant's share, above 0: 2 gets twice of what 1 gets."""
    priority: int = 0
    """Lower first, among the requests of one tenant; as in vLLM."""
    cost: float = 1.0
    """Tokens of its prompt that are to be computed."""
    deadline: float | None = None
    """On the clock of the event loop, in seconds: from then on nobody wants the answer."""

    def expired(self, now: float) -> bool:
        """Its deadline has passed."""
        return self.deadline is not None and self.deadline <= now

"""Equal replicas take turns."""

from __future__ import annotations

from collections.abc import Sequence

from policies.routing.base import Candidate


class Rotation:
    """Remembers the replica that was chosen last; the next one by name is first, so that turns
    stay fair when replicas come and go."""

    def __init__(self) -> None:
        self._last = ""

    def in_turn(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """All of them, whose turn it is first."""
        return sorted(candidates, key=lambda each: (each.replica <= self._last, each.replica))

    def chose(self, candidate: Candidate) -> None:
        """It had its turn."""
        self._last = candidate.replica

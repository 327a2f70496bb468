"""What every discovery does."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from policies.engine import EngineConfig


class Discovery(Protocol):
    """Finds replicas."""

    def lists(self) -> AsyncIterator[Sequence[EngineConfig]]:
        """Complete lists of the replicas that there are: one at the start, and one after each
        change. Never ends and never raises for what may pass (a name that does not resolve, a file
        that cannot be read): the last list stays, and the log says why."""

"""What every discovery does."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from policies.engine import EngineConfig


class Discovery(Protocol):
    """Finds replicas."""

    @property
    def problem(self) -> str | None:
        """Why the last look failed; None: it did not."""

    def lists(self) -> AsyncGenerator[Sequence[EngineConfig], None]:
        """Complete lists of the replicas that there are: one as soon as they are known, and one
        after each change. Never ends and never raises for what may pass (a name that does not
        resolve, a file that cannot be read): the last list stays, and the log says why. To be
        closed (`aclosing`) by whoever asks; may be asked for again, for one list at a time."""

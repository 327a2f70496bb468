"""How long a load may take before what has not come is computed."""

from __future__ import annotations

import asyncio
import contextlib

PATIENCE = 0.25
"""Part of its time that a load gets before anything has come."""


def allowed(part_done: float) -> float:
    """Part of its time after which a load is given up when no more than `part_done` of it has come:
    a tier that is far too slow is known early, one at half the pace gets all its time."""
    return min(1.0, PATIENCE + 2 * part_done)


class LoadLimit:
    """Of one load. `timeout` surrounds it."""

    def __init__(self, give_up_s: float | None) -> None:
        """None: no limit. Called where an event loop runs."""
        self.timeout = asyncio.timeout(give_up_s)
        self._give_up_s = give_up_s
        self._began = asyncio.get_running_loop().time()
        self._latest = self._began + (give_up_s or 0.0)

    def begin(self) -> None:
        """The first block is asked for now, and not while another load was waited for."""
        self._began = asyncio.get_running_loop().time()
        self.note(0.0)

    def note(self, part_done: float) -> None:
        """So much has come."""
        if self._give_up_s is not None:
            until = self._began + allowed(part_done) * self._give_up_s
            with contextlib.suppress(RuntimeError):  # it is over already
                self.timeout.reschedule(min(self._latest, until))

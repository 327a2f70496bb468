"""What stands in the way of a discovery, and the log lines about it."""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)


class Problem:
    """Says each reason once, and once that all is well again."""

    def __init__(self, where: str) -> None:
        """`where`: what is looked at, as people call it."""
        self._where = where
        self.reason: str | None = None
        """None: there is none."""

    def report(self, reason: str, *, again: bool = False) -> None:
        """The look failed. `again`: say it even when it was said before."""
        if again or reason != self.reason:
            log.warning("%s: %s; the replicas stay as they are", self._where, reason)
        self.reason = reason

    def solve(self) -> None:
        """The look succeeded."""
        if self.reason is not None:
            log.info("%s: works again", self._where)
        self.reason = None

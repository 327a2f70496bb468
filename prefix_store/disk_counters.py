"""What the disk tier counts, and how it complains: about every kind of fault once a minute."""

from __future__ import annotations

import errno
import logging
import threading
import time
from dataclasses import dataclass

LOG_EVERY_S = 60.0

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class DiskCounters:
    """Since the start."""

    records_written: int = 0
    bytes_written: int = 0
    records_read: int = 0
    bytes_read: int = 0
    records_removed: int = 0
    records_recovered: int = 0
    files_discarded: int = 0
    """At the start: torn, foreign, without their parent, or too many for the quota."""
    records_damaged: int = 0
    """Removed at a read: torn or changed."""
    records_missing: int = 0
    """Somebody else removed the file."""
    writes_refused: int = 0
    """No room in the quota, or not the record of its block."""
    faults: int = 0
    """The operating system refused something: no space, no permission, an I/O error."""


class FaultLog:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._logged: dict[tuple[str, int], float] = {}
        """By what was tried and the error's number, so it stays small."""

    def note(self, tried: str, error: OSError) -> None:
        """Log a fault unless one like it was logged a short time ago."""
        kind = (tried, error.errno or 0)
        now = time.monotonic()
        with self._lock:
            if now - self._logged.get(kind, -LOG_EVERY_S) < LOG_EVERY_S:
                return
            self._logged[kind] = now
        logger.warning(
            "disk tier: could not %s a block: %s (%s); logged once a minute",
            tried,
            error.strerror or error,
            errno.errorcode.get(error.errno or 0, "unknown"),
        )

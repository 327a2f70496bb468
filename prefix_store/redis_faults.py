"""What goes wrong with Redis: counted by kind, and told once a minute in a plain sentence."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

LOG_EVERY_S = 60.0

logger = logging.getLogger(__name__)

_HINTS = {
    "NOAUTH": "it wants a password: put user and password into store.redis.url",
    "WRONGPASS": "it refuses user or password of store.redis.url",
    "NOPERM": "the user of store.redis.url may not do this; it needs HSCAN, HSET, HDEL, GET, SET, "
    "GETRANGE, STRLEN, EXISTS, PEXPIRE, UNLINK and PING on keys that start with the prefix",
    "READONLY": "it is a read-only replica: store.redis.url must name the primary",
    "MOVED": "it is part of a cluster: write redis+cluster:// in store.redis.url",
    "OOM": "it is full (maxmemory) and evicts nothing: lower store.redis.capacity or give it more",
    "LOADING": "it is still reading its data from disk",
    "CLUSTERDOWN": "the cluster is not complete",
    "MISCONF": "it refuses writes since it cannot save its data to disk",
}


@dataclass(slots=True)
class RedisCounters:
    """Since the start."""

    records_written: int = 0
    bytes_written: int = 0
    records_found: int = 0
    """Asked to write, and there already: an earlier write, or another store's."""
    records_read: int = 0
    bytes_read: int = 0
    records_recovered: int = 0
    records_damaged: int = 0
    """Removed at a read: not as they were written."""
    writes_full: int = 0
    """Refused by Redis for lack of memory."""
    timeouts: int = 0
    disconnects: int = 0
    """Could not connect, or the connection broke."""
    refusals: int = 0
    """Other errors that Redis answered: rights, replicas, configuration."""
    calls_while_open: int = 0
    """Answered at once, without Redis, since the circuit breaker is open."""
    breaker_openings: int = 0

    @property
    def faults(self) -> int:
        return self.timeouts + self.disconnects + self.refusals + self.writes_full


class FaultLog:
    """Says each kind of thing at most once a minute, and never a password."""

    def __init__(self, url: str) -> None:
        self._where = address_of(url)
        self._logged: dict[str, float] = {}
        """By the error's first word, of which there are few; others share one place."""

    def refused(self, answer: str) -> None:
        """Redis answered with an error."""
        word = answer.split(" ", 1)[0]
        hint = _HINTS.get(word)
        self._say(word if hint else "other", f"refuses: {hint or answer[:200]}")

    def unreachable(self, why: str) -> None:
        self._say("unreachable", f"cannot be reached: {why[:200]}")

    def timed_out(self, timeout_s: float) -> None:
        self._say("timeout", f"did not answer within {timeout_s * 1000:.0f} ms")

    def opened(self) -> None:
        self._say("opened", "is left alone until it answers again; its blocks count as misses")

    def closed(self) -> None:
        self._say("closed", "answers again")

    def _say(self, kind: str, what: str) -> None:
        now = time.monotonic()
        if now - self._logged.get(kind, -LOG_EVERY_S) < LOG_EVERY_S:
            return
        self._logged[kind] = now
        logger.warning("redis tier: %s %s (logged once a minute)", self._where, what)


def address_of(url: str) -> str:
    """The URL without user, password and query."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host}{parts.path}"

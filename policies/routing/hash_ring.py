"""Consistent hashing: which replicas a key prefers, in which order.

Karger et al. 1997: every replica stands at many points of a ring; a key goes to the replica at the
next point. When a replica goes, only its keys move; when one comes, it takes keys from all.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from hashlib import blake2b

MAX_REPLICAS = 1024
"""That stand on the ring; when more have been seen, those that are gone are taken off."""


class HashRing:
    """Replicas that are away for a moment keep their points: they are passed over."""

    def __init__(self, virtual_nodes: int) -> None:
        self._virtual_nodes = virtual_nodes
        self._members: set[str] = set()
        self._points: list[int] = []
        self._owners: list[str] = []

    def __len__(self) -> int:
        """Replicas on it."""
        return len(self._members)

    def order(self, key: bytes, replicas: Iterable[str]) -> list[str]:
        """All of `replicas`, in the order in which the ring meets them from the key's place. The
        same on every gateway. About 1 us a replica."""
        wanted = set(replicas)
        if not wanted <= self._members:
            self._place(wanted)
        start = bisect_left(self._points, _point(key))
        owners, found = self._owners, []
        for position in range(start - len(owners), start):
            owner = owners[position]
            if owner in wanted:
                wanted.remove(owner)
                found.append(owner)
                if not wanted:
                    break
        return found

    def _place(self, replicas: set[str]) -> None:
        members = self._members | replicas
        self._members = members if len(members) <= MAX_REPLICAS else set(replicas)
        placed = sorted(
            (_point(f"{replica}#{number}".encode()), replica)
            for replica in self._members
            for number in range(self._virtual_nodes)
        )
        self._points = [point for point, _ in placed]
        self._owners = [replica for _, replica in placed]


def _point(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "big")

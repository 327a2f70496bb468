"""Least recently used."""

from __future__ import annotations

from typing import Any, Literal

from policies.base import Settings
from policies.eviction.base import B, EvictionQueue
from policies.eviction.ranked_queue import Rank, RankedQueue


class LruQueue(RankedQueue[B]):
    """By time of the last use; of blocks used together the deepest first."""

    def rank(self, block: B) -> Rank:
        return (block.last_used, -block.depth)


class LruEviction(Settings):
    """Least recently used; among equals the deepest block of a prompt first."""

    kind: Literal["lru"] = "lru"

    def queue(self) -> EvictionQueue[Any]:
        return LruQueue[Any]()

"""First in, first out."""

from __future__ import annotations

from typing import Any, Literal

from policies.base import Settings
from policies.eviction.base import B, EvictionQueue
from policies.eviction.ranked_queue import Rank, RankedQueue


class FifoQueue(RankedQueue[B]):
    """By time of arrival."""

    def rank(self, block: B) -> Rank:
        return (block.inserted, -block.depth)


class FifoEviction(Settings):
    """First in, first out; reuse does not matter."""

    kind: Literal["fifo"] = "fifo"

    def queue(self) -> EvictionQueue[Any]:
        return FifoQueue[Any]()

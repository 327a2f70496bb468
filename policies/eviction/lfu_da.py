"""Least frequently used, with dynamic aging."""

from __future__ import annotations

from typing import Any, Literal

from policies.base import Settings
from policies.eviction.aged_queue import AgedQueue
from policies.eviction.base import B, EvictionQueue


class LfuDaQueue(AgedQueue[B]):
    """A block's key is its number of uses plus the queue's age at the last one."""

    def value(self, block: B, uses: int) -> float:
        del block
        return float(uses)


class LfuDaEviction(Settings):
    """Least frequently used with dynamic aging (LFU-DA), so that blocks that were popular once do
    go. Source: M. Arlitt, L. Cherkasova, J. Dilley, R. Friedrich, T. Jin, "Evaluating content
    management techniques for Web proxy caches", 2000. Good for chat, where popular system prompts
    repeat; loses to LRU on agents."""

    kind: Literal["lfu_da"] = "lfu_da"

    def queue(self) -> EvictionQueue[Any]:
        return LfuDaQueue[Any]()

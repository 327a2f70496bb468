"""What a replica without events is believed to hold: the prompts that it computed lately."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

from prefix_store.base import BlockHash
from prefix_store.residency import Holder, Residency


class SentPrefixes:
    """The prompts of one replica, in the index as blocks that it is assumed to have. Forgotten a
    while after their last use, and before that when there are too many: those that were used
    longest ago first, tails first. Pure; every time is an argument (seconds of one clock)."""

    def __init__(
        self, residency: Residency, holder: Holder, *, expiry_s: float, max_blocks: int
    ) -> None:
        self._residency = residency
        self._holder = replace(holder, assumed=True)
        self._expiry_s = expiry_s
        self._max_blocks = max_blocks
        self._used: OrderedDict[BlockHash, float] = OrderedDict()
        """Block -> its last use, the oldest first; a parent always after its children."""

    def __len__(self) -> int:
        """Blocks."""
        return len(self._used)

    def add(self, hashes: Sequence[BlockHash], now: float) -> None:
        """The replica has computed this prompt. O(blocks)."""
        self.expire(now)
        hashes = self._residency.store(self._holder, None, hashes[: self._max_blocks])
        used = self._used
        for block_hash in reversed(hashes):
            used[block_hash] = now
            used.move_to_end(block_hash)
        while len(used) > self._max_blocks:
            self._forget_oldest()

    def expire(self, now: float) -> None:
        """Forget what was used too long ago."""
        used = self._used
        while used and next(iter(used.values())) + self._expiry_s <= now:
            self._forget_oldest()

    def clear(self) -> None:
        """The replica is new, or what it holds is known better now."""
        if not self._used:
            return
        self._residency.clear(self._holder, self._used)
        self._used.clear()

    def _forget_oldest(self) -> None:
        block_hash, _ = self._used.popitem(last=False)
        self._residency.remove(self._holder, block_hash)

"""The common ground of policies that value a block by its uses and let old values age."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from policies.eviction.base import B
from policies.eviction.ranked_queue import Rank, RankedQueue


@dataclass(slots=True)
class Worth:
    """What an aged queue remembers of a block."""

    uses: int
    key: float
    """Age of the queue at its last use, and its value then."""


class AgedQueue(RankedQueue[B]):
    """Lowest key first, among equals the least recently used, then the deepest. The queue's age is
    the highest key that went, so what is used now starts above what was popular once: nothing is
    ever walked to make it older. A request uses all ancestors of the blocks it uses, so they have
    their uses too."""

    def __init__(self) -> None:
        super().__init__()
        self._age = 0.0

    @abstractmethod
    def value(self, block: B, uses: int) -> float:
        """Of a block that was used so often."""

    def rank(self, block: B) -> Rank:
        if block.mark is None:
            self.insert(block)
        return (block.mark.key, block.last_used, -block.depth)

    def insert(self, block: B) -> None:
        block.mark = Worth(1, self._age + self.value(block, 1))

    def use(self, blocks: Sequence[B]) -> None:
        age = self._age
        for block in blocks:
            worth: Worth | None = block.mark
            if worth is None:
                self.insert(block)
                continue
            worth.uses += 1
            worth.key = age + self.value(block, worth.uses)

    def pop(self, now: float) -> B | None:
        victim = super().pop(now)
        if victim is not None:
            # A block that was leased for long may have a key from a younger queue.
            self._age = max(self._age, victim.mark.key)
        return victim

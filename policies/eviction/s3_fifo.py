"""Three FIFO queues."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from policies.base import Settings
from policies.eviction.base import B, EvictionQueue
from policies.eviction.ghost_list import GhostList
from policies.eviction.ranked_queue import Rank, RankedQueue

MAX_USES = 3
"""The paper counts in two bits."""


@dataclass(slots=True)
class Turn:
    """A block's place in line."""

    main: bool
    since: int
    """The tier's clock when it joined its line."""
    round: int = 0
    """Number of its reinsertion; 0: as it came."""
    uses: int = 0
    """Since it joined."""
    popped: bool = False
    """If it leaves now, it was evicted."""


class _Line(RankedQueue[B]):
    """First come, first out; of blocks that came together the deepest."""

    def rank(self, block: B) -> Rank:
        turn: Turn = block.mark
        return (turn.since, turn.round, -block.depth)


class S3FifoQueue(EvictionQueue[B]):
    """A small line for newcomers, the main line, and the ghosts of who left the small one. Lines
    hold candidates; other blocks keep their turn."""

    def __init__(self, small_share: float) -> None:
        self._small_share = small_share
        self._small, self._main = _Line[B](), _Line[B]()
        self._ghosts = GhostList()
        self._size = 0
        self._clock = 0
        self._rounds = 0

    def insert(self, block: B) -> None:
        self._clock = max(self._clock, block.inserted)
        self._size += 1
        block.mark = Turn(block.hash in self._ghosts, block.inserted)
        self._ghosts.discard(block.hash)

    def use(self, blocks: Sequence[B]) -> None:
        for block in blocks:
            turn = self._turn(block)
            turn.uses = min(MAX_USES, turn.uses + 1)

    def add(self, block: B) -> None:
        turn = self._turn(block)
        turn.popped = False
        (self._main if turn.main else self._small).add(block)

    def discard(self, block: B) -> None:
        self._small.discard(block)
        self._main.discard(block)

    def pop(self, now: float) -> B | None:
        victim = None
        if len(self._small) >= self._small_share * len(self):
            victim = self._pop_small(now)
        if victim is None:
            victim = self._pop_main(now)
        if victim is None:
            victim = self._pop_small(now) or self._pop_main(now)
        if victim is not None:
            victim.mark.popped = True
        return victim

    def remove(self, block: B) -> None:
        self.discard(block)
        turn: Turn | None = block.mark
        if turn is None:
            return
        block.mark = None
        self._size -= 1
        if turn.popped and not turn.main:
            self._ghosts.add(block.hash)
        self._ghosts.trim(int((1 - self._small_share) * self._size))

    def admits(self, block: B, now: float) -> bool:
        del block, now
        return True

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def _pop_small(self, now: float) -> B | None:
        """The next newcomer that was not used twice; the others join the main line."""
        while (block := self._small.pop(now)) is not None:
            turn: Turn = block.mark
            if turn.uses <= 1:
                return block
            turn.main = True
            turn.uses = 0
            self._join_main(block, turn)
        return None

    def _pop_main(self, now: float) -> B | None:
        """The next that was not used; the others get another round for each use."""
        while (block := self._main.pop(now)) is not None:
            turn: Turn = block.mark
            if turn.uses == 0:
                return block
            turn.uses -= 1
            self._join_main(block, turn)
        return None

    def _join_main(self, block: B, turn: Turn) -> None:
        self._rounds += 1
        turn.since, turn.round = self._clock, self._rounds
        self._main.add(block)

    def _turn(self, block: B) -> Turn:
        if block.mark is None:
            self.insert(block)
        turn: Turn = block.mark
        return turn


class S3FifoEviction(Settings):
    """Three FIFO queues (S3-FIFO): newcomers that are not used soon go early. Source: J. Yang, Y.
    Zhang, Z. Qiu, Y. Yue, K. Rashmi, "FIFO queues are all you need for cache eviction", SOSP 2023.
    Differs from it where a prefix tree demands: the lines hold leaves only, and the share of the
    small one is a share of the leaves."""

    kind: Literal["s3_fifo"] = "s3_fifo"
    small: float = Field(default=0.1, gt=0.0, lt=1.0)
    """Share of the newcomers' line."""

    def queue(self) -> EvictionQueue[Any]:
        return S3FifoQueue[Any](self.small)

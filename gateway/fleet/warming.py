"""Prompts that are being computed for the first time: equal ones wait for the first of them."""

from __future__ import annotations

import asyncio
import enum
from bisect import bisect_left
from collections.abc import Sequence

from prefix_store.base import BlockHash

_MAX_HASHES = 131_072
"""256 prompts of 8,192 tokens at 16 tokens a block."""


class _State(enum.Enum):
    COMPUTING = enum.auto()
    DONE = enum.auto()
    FAILED = enum.auto()


class Warming:
    """A request that computes blocks which no replica had. Whoever began it says how it ends:
    `done` at the first token, else `failed_or_done` at the end, however its request ends."""

    def __init__(
        self,
        prefixes: WarmingPrefixes,
        hashes: Sequence[BlockHash],
        first_missing: int,
        replica: str,
    ) -> None:
        """`hashes`: of the whole prompt."""
        self.replica = replica
        self.hashes = hashes
        self.first_missing = first_missing
        self._prefixes = prefixes
        self._state = _State.COMPUTING
        self._ended = asyncio.Event()

    @property
    def failed(self) -> bool:
        """It will not be there: its request was aborted, or its replica lost."""
        return self._state is _State.FAILED

    def done(self) -> None:
        """Its blocks are on its replica."""
        self._end(_State.DONE)

    def failed_or_done(self) -> None:
        """It has ended. Failed, unless it was done before; whoever waits goes on at once."""
        self._end(_State.FAILED)

    def blocks_of(self, hashes: Sequence[BlockHash]) -> int:
        """How many blocks of another prompt it computes, or needed. O(log n): two prompts have the
        same hash at the same place only after the same prefix."""
        return bisect_left(
            range(min(len(hashes), len(self.hashes))),
            True,
            key=lambda i: hashes[i] != self.hashes[i],
        )

    async def wait(self, max_s: float) -> bool:
        """Until it has ended, or time is over. Whether its blocks are there now."""
        if self._state is _State.COMPUTING and max_s > 0:
            try:
                async with asyncio.timeout(max_s):
                    await self._ended.wait()
            except TimeoutError:
                pass
        return self._state is _State.DONE

    def _end(self, state: _State) -> None:
        if self._state is _State.COMPUTING:
            self._state = state
            self._prefixes.forget(self)
            self._ended.set()


class WarmingPrefixes:
    """Finds the request that computes a block. Between `find` and `begin` nothing may be awaited:
    then of equal prompts only the first begins.

    A block that several compute belongs to the first of them; if that one fails, the block belongs
    to nobody until somebody begins with it anew.
    """

    def __init__(self, max_hashes: int = _MAX_HASHES) -> None:
        """With more than `max_hashes` blocks the oldest are forgotten: nobody finds them any more,
        while those who wait for them still do."""
        self._max_hashes = max_hashes
        self._by_hash: dict[BlockHash, Warming] = {}
        self._num_hashes_of: dict[Warming, int] = {}
        """In the order in which they began."""
        self._num_hashes = 0

    def __len__(self) -> int:
        """Blocks that are being computed."""
        return len(self._by_hash)

    def begin(self, hashes: Sequence[BlockHash], first_missing: int, replica: str) -> Warming:
        """`replica` is about to compute the blocks from `first_missing` on, which it lacks.
        O(those blocks)."""
        warming = Warming(self, hashes, first_missing, replica)
        missing = hashes[first_missing : first_missing + self._max_hashes]
        while self._num_hashes_of and self._num_hashes + len(missing) > self._max_hashes:
            self.forget(next(iter(self._num_hashes_of)))
        if missing:
            self._num_hashes_of[warming] = len(missing)
            self._num_hashes += len(missing)
            claim = self._by_hash.setdefault
            for block_hash in missing:
                claim(block_hash, warming)
        return warming

    def find(self, hashes: Sequence[BlockHash], held_blocks: int) -> Warming | None:
        """Who computes the most blocks of this prompt, if that is more than the first
        `held_blocks`. O(blocks beyond those)."""
        if self._by_hash:
            owner = self._by_hash.get
            for block_hash in reversed(hashes[held_blocks:]):
                warming = owner(block_hash)
                if warming is not None:
                    return warming
        return None

    def forget(self, warming: Warming) -> None:
        """Nobody finds it from now on."""
        num_hashes = self._num_hashes_of.pop(warming, 0)
        self._num_hashes -= num_hashes
        owner = self._by_hash.get
        for block_hash in warming.hashes[warming.first_missing :][:num_hashes]:
            if owner(block_hash) is warming:
                del self._by_hash[block_hash]

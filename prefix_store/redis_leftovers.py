"""Blocks that a store does not count and that may be in Redis nevertheless.

They come from removals and writes that a fault or a cancellation interrupted. Until they are gone
for certain their references stay, so a store that is killed meanwhile finds them at its start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Sequence

from prefix_store.base import BlockHash
from prefix_store.redis_keyspace import RedisKeyspace

LINGER_S = 30.0
"""What was sent on a connection that is given up may still be carried out for some time."""

MAX_LATE = 65_536
SLICE_KEYS = 256


class Leftovers:
    """Cleans up before anything is written, and behind writes whose answer never came."""

    def __init__(
        self, keys: RedisKeyspace, clock: Callable[[], float], linger_s: float = LINGER_S
    ) -> None:
        self._keys = keys
        self._clock = clock
        self._linger_s = linger_s
        self._gone: set[BlockHash] = set()
        """To be removed, and their references."""
        self._suspects: set[BlockHash] = set()
        """Perhaps written, perhaps yet to be."""
        self._late: dict[BlockHash, float] = {}
        """Suspects that were removed once, and until when they are looked for again."""
        self._lock = asyncio.Lock()

    def add(self, hashes: Collection[BlockHash]) -> None:
        """They are to go; nothing about them is under way."""
        self._gone.update(hashes)

    def suspect(self, hashes: Collection[BlockHash]) -> None:
        """They were sent, and nobody knows whether they arrived."""
        self._suspects.update(hashes)

    async def claim(self, hashes: Sequence[BlockHash]) -> bool:
        """Whether these may be written now: all that is left of others has gone."""
        async with self._lock:
            if len(self._late) > MAX_LATE or not await self._settle():
                return False
            for block_hash in hashes:
                self._late.pop(block_hash, None)
            return True

    async def settle(self) -> bool:
        """Remove what is known; True when nothing is left but what may still arrive."""
        async with self._lock:
            return await self._settle()

    async def sweep(self) -> None:
        """To be called every second: remove what has arrived late."""
        async with self._lock:
            if not await self._settle():
                return
            now = self._clock()
            over = {block_hash for block_hash, until in self._late.items() if until <= now}
            for part in _parts(list(self._late)):
                if not await self._keys.unlink_ours(part):
                    return
            for block_hash in over:
                del self._late[block_hash]
            self._gone |= over
            await self._settle()

    async def _settle(self) -> bool:
        for part in _parts(list(self._suspects)):
            if not await self._keys.unlink_ours(part):
                return False
            self._suspects.difference_update(part)
            self._late.update(dict.fromkeys(part, self._clock() + self._linger_s))
        for part in _parts(list(self._gone)):
            if not await self._keys.unlink_ours(part) or not await self._keys.end(part):
                return False
            self._gone.difference_update(part)
        return True


def _parts(hashes: Sequence[BlockHash]) -> Iterator[Sequence[BlockHash]]:
    for at in range(0, len(hashes), SLICE_KEYS):
        yield hashes[at : at + SLICE_KEYS]

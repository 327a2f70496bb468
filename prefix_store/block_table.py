"""The table of known blocks, by hash."""

from __future__ import annotations

from collections.abc import Iterator

from prefix_store.base import BlockHash
from prefix_store.leaf_queue import KnownBlock

_SHARDS = 256


class BlockTable:
    """A dictionary in 256 parts, one for each first byte of a hash. A dictionary that grows, or has
    had many entries removed, copies itself: a million entries would stop an event loop for a tenth
    of a second, a part of them for less than a millisecond."""

    def __init__(self) -> None:
        self.shards: tuple[dict[BlockHash, KnownBlock], ...] = tuple({} for _ in range(_SHARDS))
        """By the first byte of a hash: a loop over many blocks goes there itself, since a call a
        block would cost as much as the look-up; then it tells `count`."""
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[KnownBlock]:
        """All blocks, in no order. Nothing may be added or removed meanwhile."""
        for shard in self.shards:
            yield from shard.values()

    def get(self, block_hash: BlockHash) -> KnownBlock | None:
        return self.shards[block_hash[0]].get(block_hash)

    def count(self, added: int) -> None:
        """So many blocks came, or if negative went."""
        self._length += added

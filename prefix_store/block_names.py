"""What one holder calls its blocks: names of its events -> our hashes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from prefix_store.base import BlockHash
from prefix_store.events import ExternalHash

_SHARDS = 64
_64_BITS = (1 << 64) - 1


def short_name(external: ExternalHash) -> int:
    """64 bits of a publisher's hash, the ones that vLLM itself keeps by default. Two blocks of one
    name are noticed, see BlockNames.add."""
    if isinstance(external, int):
        return external & _64_BITS
    return int.from_bytes(external[-8:], "big")


class BlockNames:
    """The blocks that a holder has. An entry leaves with its last copy."""

    __slots__ = ("_aliases", "_copies", "_further", "_length", "_num_aliases", "_shards")

    def __init__(self) -> None:
        self._shards: tuple[dict[int, BlockHash], ...] = tuple({} for _ in range(_SHARDS))
        """By the lowest bits of a name, for the reason that BlockTable has."""
        self._length = 0
        self._copies: dict[int, int] = {}
        """Where there are several: vLLM does not merge equal blocks, and reports each copy as
        stored and as removed."""
        self._further = 0
        """Copies beyond the first of each."""
        self._aliases: dict[BlockHash, int] = {}
        """Further names of a block, such as those of one adapter under two names."""
        self._num_aliases = 0

    def __len__(self) -> int:
        """Names."""
        return self._length

    @property
    def num_blocks(self) -> int:
        """Distinct blocks."""
        return self._length - self._num_aliases

    @property
    def num_copies(self) -> int:
        """Places that the blocks take at the holder."""
        return self._length + self._further

    def get(self, name: int) -> BlockHash | None:
        return self._shards[name % _SHARDS].get(name)

    def hashes(self) -> Iterator[BlockHash]:
        """Of all blocks; those with several names come as often. Nothing may be changed
        meanwhile."""
        return (block_hash for _, block_hash in self.names())

    def add(self, name: int, block_hash: BlockHash, *, is_held: bool) -> None:
        """A name. `is_held`: the holder has the block already, under another one."""
        shard = self._shards[name % _SHARDS]
        self._length += name not in shard
        shard[name] = block_hash
        if is_held:
            self._aliases[block_hash] = self._aliases.get(block_hash, 0) + 1
            self._num_aliases += 1

    def add_copy(self, name: int) -> None:
        """One more of a block that is there."""
        self._copies[name] = self._copies.get(name, 1) + 1
        self._further += 1

    def remove_copy(self, name: int) -> BlockHash | None:
        """One less; the block that the holder has no more."""
        copies = self._copies.get(name, 1)
        if copies == 1:
            return self.remove(name)
        self._further -= 1
        if copies > 2:
            self._copies[name] = copies - 1
        else:
            del self._copies[name]
        return None

    def remove(self, name: int) -> BlockHash | None:
        """All copies of that name; the block that the holder has no more."""
        block_hash = self._shards[name % _SHARDS].pop(name, None)
        self._further -= self._copies.pop(name, 1) - 1
        if block_hash is None:
            return None
        self._length -= 1
        aliases = self._aliases.pop(block_hash, 0)
        if not aliases:
            return block_hash
        self._num_aliases -= 1
        if aliases > 1:
            self._aliases[block_hash] = aliases - 1
        return None

    def names(self) -> Iterator[tuple[int, BlockHash]]:
        """All, with what they mean. Nothing may be changed meanwhile."""
        return itertools.chain.from_iterable(shard.items() for shard in self._shards)

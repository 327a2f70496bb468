"""The block cache of a simulated engine (engine_adapter.simulated). Pure.

Behaves like vLLM's block pool (vllm/v1/core/block_pool.py, 0.32): blocks with a hash can be found,
also while nobody uses them; free blocks wait in the order in which they will be taken; equal blocks
are not merged; each copy that is taken away is announced.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from prefix_store.base import BlockHash


class Block:
    """Room for the KV of `block_size` tokens."""

    __slots__ = ("copy", "hash", "users")

    def __init__(self) -> None:
        self.hash: BlockHash | None = None
        """What it holds, once it is full."""
        self.users = 0
        """Sequences that use it; free at 0."""
        self.copy: Block | None = None
        """The next block with an equal hash."""


class BlockCache:
    """`num_blocks` blocks; every one is either free or has users."""

    def __init__(self, num_blocks: int, removed: Callable[[BlockHash], None]) -> None:
        """`removed` is told about every block that can be found no more."""
        self.num_blocks = num_blocks
        self._removed = removed
        self._free: OrderedDict[Block, None] = OrderedDict()
        """Those that can be found, in the order in which they will be taken."""
        self._blank: list[Block] = []
        """Those that cannot; one is as good as the other."""
        self._unmade = num_blocks
        """Blocks that were never taken: they are made when they are."""
        self._found: dict[BlockHash, Block] = {}
        """Hash -> the oldest of its copies."""

    @property
    def num_free(self) -> int:
        """Blocks that nobody uses, with or without a hash."""
        return len(self._free) + len(self._blank) + self._unmade

    @property
    def usage(self) -> float:
        """Share of the blocks that have users."""
        return 1.0 - self.num_free / self.num_blocks

    def find(self, hashes: Sequence[BlockHash], most: int) -> list[Block]:
        """The blocks of the longest known run from the start, at most so many."""
        blocks: list[Block] = []
        for block_hash in hashes[:most]:
            block = self._found.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def use(self, blocks: Iterable[Block]) -> None:
        """One more user for each of them."""
        for block in blocks:
            if block.users == 0:
                del self._free[block]
            block.users += 1

    def take(self, count: int) -> list[Block]:
        """So many free blocks, with one user each. What they held is forgotten. The caller has
        looked at num_free."""
        blocks = [self._next() for _ in range(count)]
        for block in blocks:
            block.users = 1
        return blocks

    def _next(self) -> Block:
        if self._blank:
            return self._blank.pop()
        if self._unmade:
            self._unmade -= 1
            return Block()
        block, _ = self._free.popitem(last=False)
        self._forget(block)
        return block

    def name(self, block: Block, block_hash: BlockHash) -> None:
        """The block is full and can be found from now on."""
        block.hash = block_hash
        oldest = self._found.get(block_hash)
        if oldest is None:
            self._found[block_hash] = block
            return
        while oldest.copy is not None:
            oldest = oldest.copy
        oldest.copy = block

    def release(self, blocks: Sequence[Block]) -> None:
        """One user less for each. Of a sequence's blocks the tail is taken first; those without a
        hash before all others."""
        for block in reversed(blocks):
            block.users -= 1
            if block.users:
                continue
            if block.hash is None:
                self._blank.append(block)
            else:
                self._free[block] = None

    def reset(self) -> bool:
        """Forget everything; False, and nothing happens, while any block has users."""
        if self.num_free < self.num_blocks:
            return False
        for block in self._free:
            block.hash = None
            block.copy = None
        self._blank += self._free
        self._free.clear()
        self._found.clear()
        return True

    def __len__(self) -> int:
        """Different blocks that can be found."""
        return len(self._found)

    def _forget(self, block: Block) -> None:
        block_hash = block.hash
        if block_hash is None:
            return
        before = self._found[block_hash]
        if before is block:
            if block.copy is None:
                del self._found[block_hash]
            else:
                self._found[block_hash] = block.copy
        else:
            while before.copy is not block:
                assert before.copy is not None
                before = before.copy
            before.copy = block.copy
        block.hash = None
        block.copy = None
        self._removed(block_hash)

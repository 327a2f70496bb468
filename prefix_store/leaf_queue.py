"""Blocks of a residency index, and the order in which they leave it: least recently used first,
tails first."""

from __future__ import annotations

import heapq

import msgspec

from prefix_store.base import BlockHash

ENTRY_BYTES = 128
"""Memory of one entry of the queue: a tuple, its time and its place in the list."""

_SLACK = 1024


class KnownBlock(msgspec.Struct, gc=False, eq=False):
    """One block. It refers to other blocks by their hashes only, so that a million of them need
    neither walks of the garbage collector nor room for its headers."""

    hash: BlockHash
    parent: BlockHash | None
    """None: the first block of a prompt."""
    holders: int
    """Bit mask."""
    children: int
    """Blocks right below it."""
    last_used: int
    """A time of its index."""
    queued: bool
    """In the queue, maybe with a time that has passed since."""


class LeafQueue:
    """The leaves among the blocks. Lazy: a block that was used, or got children, keeps its entry
    until that comes up; so a use costs nothing here."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, BlockHash, KnownBlock]] = []
        self._limit = _SLACK

    def __len__(self) -> int:
        """Entries, at most about twice as many as leaves."""
        return len(self._heap)

    def add(self, leaf: KnownBlock) -> None:
        """A block that is a leaf from now on. Those that are in the queue are left where they
        are."""
        if leaf.queued:
            return
        leaf.queued = True
        heapq.heappush(self._heap, (leaf.last_used, leaf.hash, leaf))
        if len(self._heap) > self._limit:
            self._sweep()

    def pop(self) -> KnownBlock | None:
        """Take out the leaf that was used longest ago."""
        heap = self._heap
        while heap:
            time, _, block = heap[0]
            if block.children:
                heapq.heappop(heap)
                block.queued = False
            elif block.last_used != time:
                heapq.heapreplace(heap, (block.last_used, block.hash, block))
            else:
                heapq.heappop(heap)
                block.queued = False
                return block
        return None

    @property
    def next_time(self) -> int | None:
        """No leaf in the queue was used before it; None: there is none."""
        return self._heap[0][0] if self._heap else None

    def _sweep(self) -> None:
        """Drop the entries of blocks that have children."""
        leaves: list[tuple[int, BlockHash, KnownBlock]] = []
        for entry in self._heap:
            block = entry[2]
            if block.children:
                block.queued = False
            else:
                leaves.append(entry)
        heapq.heapify(leaves)
        self._heap = leaves
        self._limit = 2 * len(leaves) + _SLACK

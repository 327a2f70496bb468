"""Residency: which holder has which blocks. Derived state of a gateway; losing it costs speed."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from policies.eviction import LruEviction
from prefix_store.base import BlockHash
from prefix_store.index import Node, RadixIndex

MASK_BYTES = 48
"""Memory of one node's bit mask (upper bound for 128 holders)."""

_ONCE_RESIDENT = 1
"""Bit of a mask: some holder has had the block. Stays when they lose it."""


class Medium(enum.StrEnum):
    """Where a holder keeps its blocks."""

    DEVICE = "device"
    MEMORY = "memory"
    DISK = "disk"
    REDIS = "redis"


@dataclass(frozen=True, slots=True)
class Holder:
    """A replica's device memory, or one tier of a store."""

    source: str
    """Id of the engine or store, such as "engine-0"."""
    medium: Medium


@dataclass(frozen=True, slots=True)
class Match:
    """What is known of one prompt. All lengths are contiguous runs of blocks from its start."""

    seen_blocks: int
    """Computed before: some holder has had them, wherever they are now. At least as long as the
    run of any holder."""
    by_holder: Mapping[Holder, int]
    """Only holders that have at least the first block."""

    @property
    def available_blocks(self) -> int:
        """The longest run that one holder has."""
        return max(self.by_holder.values(), default=0)


@dataclass(frozen=True, slots=True)
class ResidencyStats:
    """Counts since the start, and sizes now."""

    nodes: int
    """Blocks known: resident, resident once, or only asked for."""
    resident_blocks: Mapping[Holder, int]
    memory_bytes: int
    capacity_bytes: int
    evicted: int
    evicted_resident: int
    """Blocks forgotten although somebody has them: the index is too small to be exact."""
    unplaced: int
    """Blocks that a holder stored below a block which was forgotten here."""


class Residency:
    """Blocks x holders, on a radix index whose values are bit masks of holders. A block that was
    resident once and is nowhere now stays as a ghost until it is evicted, so that "never seen" and
    "evicted" are told apart; a prompt that was only asked for may never have been computed, and
    counts as never seen. Plain calls: atomic on an event loop."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._index = RadixIndex[int](LruEviction())
        self._bits: dict[Holder, int] = {}
        """Holder -> its mask, one bit set, never the lowest. Bits of holders that left are given
        out again."""
        self._resident: dict[Holder, int] = {}
        self._evicted = 0
        self._evicted_resident = 0
        self._unplaced = 0

    def match(self, hashes: Sequence[BlockHash]) -> Match:
        """How much of a prompt is where. Reads only."""
        return self._match(self._index.match(hashes))

    def was_resident(self, block_hash: BlockHash) -> bool | None:
        """Whether any holder has had the block; None when it is unknown here."""
        node = self._index.get(block_hash)
        return None if node is None else bool(node.value & _ONCE_RESIDENT)

    def see(self, hashes: Sequence[BlockHash]) -> Match:
        """Remember a prompt's blocks, and that they were used now; what was known before, from
        the same walk. Exceeds the capacity by no more than this one prompt while it runs."""
        nodes = self._index.match(hashes)
        match = self._match(nodes)
        parent = nodes[-1].hash if nodes else None
        for block_hash in hashes[len(nodes) :]:
            nodes.append(self._index.insert(parent, block_hash, 0))
            parent = block_hash
        self._index.touch(nodes)
        self._evict()
        return match

    def store(self, holder: Holder, parent: BlockHash | None, hashes: Sequence[BlockHash]) -> None:
        """`holder` has the run `hashes` below `parent` (None: the start of a prompt) from now on.
        Blocks whose parent was forgotten here are left out and counted."""
        if parent is not None and parent not in self._index:
            self._unplaced += len(hashes)
            return
        bit = self._bit(holder)
        added = 0
        for block_hash in hashes:
            node = self._index.insert(parent, block_hash, 0)
            if not node.value & bit:
                node.value |= bit | _ONCE_RESIDENT
                added += 1
            parent = block_hash
        self._resident[holder] += added
        self._evict()

    def remove(self, holder: Holder, block_hash: BlockHash) -> None:
        """`holder` has the block no more. Unknown blocks are ignored."""
        node = self._index.get(block_hash)
        bit = self._bits.get(holder, 0)
        if node is not None and node.value & bit:
            node.value &= ~bit
            self._resident[holder] -= 1

    def clear(self, holder: Holder) -> None:
        """`holder` is empty or gone. Walks the whole index: rare (a restart), about 5 ms for
        100,000 blocks. Its bit is free for another holder afterwards."""
        bit = self._bits.pop(holder, 0)
        if self._resident.pop(holder, 0):
            for node in self._index.nodes():
                if node.value & bit:
                    node.value &= ~bit

    def stats(self) -> ResidencyStats:
        return ResidencyStats(
            nodes=len(self._index),
            resident_blocks=dict(self._resident),
            memory_bytes=self._memory_bytes,
            capacity_bytes=self._capacity_bytes,
            evicted=self._evicted,
            evicted_resident=self._evicted_resident,
            unplaced=self._unplaced,
        )

    @property
    def _memory_bytes(self) -> int:
        return self._index.memory_bytes + len(self._index) * MASK_BYTES

    def _match(self, nodes: Sequence[Node[int]]) -> Match:
        """What the holders have, and had, of a known run."""
        seen = 0
        ends: list[tuple[int, int]] = []
        mask = nodes[0].value if nodes else 0
        for position, node in enumerate(nodes):
            both = mask & node.value
            if both != mask:
                ends.append((mask & ~both, position))
                mask = both
                if not mask:
                    break
        ends.append((mask, len(nodes)))
        by_holder: dict[Holder, int] = {}
        for lost, length in ends:
            if lost & _ONCE_RESIDENT:
                seen = length
            if lost > _ONCE_RESIDENT:
                by_holder.update((h, length) for h, bit in self._bits.items() if lost & bit)
        return Match(seen_blocks=seen, by_holder=by_holder)

    def _bit(self, holder: Holder) -> int:
        bit = self._bits.get(holder)
        if bit is None:
            taken = _ONCE_RESIDENT
            for other in self._bits.values():
                taken |= other
            bit = ~taken & (taken + 1)
            self._bits[holder] = bit
            self._resident[holder] = 0
        return bit

    def _evict(self) -> None:
        while self._memory_bytes > self._capacity_bytes:
            node = self._index.evict()
            if node is None:
                return
            self._forget(node)

    def _forget(self, node: Node[int]) -> None:
        self._evicted += 1
        if node.value <= _ONCE_RESIDENT:
            return
        self._evicted_resident += 1
        for holder, bit in self._bits.items():
            if node.value & bit:
                self._resident[holder] -= 1

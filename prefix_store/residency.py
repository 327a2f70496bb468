"""Residency: which holder has which blocks. Derived state of a gateway; losing it costs speed."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from prefix_store.base import BlockHash
from prefix_store.bit_masks import SharedMasks
from prefix_store.block_table import BlockTable
from prefix_store.holder_bits import ONCE_RESIDENT, HolderBits
from prefix_store.leaf_queue import ENTRY_BYTES, KnownBlock, LeafQueue
from prefix_store.match import Holder, Match, Medium, Stretch
from prefix_store.residency_stats import ResidencyStats

__all__ = ["Holder", "Match", "Medium", "Residency", "ResidencyStats", "Stretch"]

BLOCK_BYTES = 188
"""Memory of one known block: itself, its hash, its entry in the table at its emptiest."""

LINK_BYTES = 108
"""Memory of one holder's having one block: its name there, in the map of the holder's events."""

_BLOCKS_PER_TICK = 16
"""Blocks that may come from events between two ticks of the clock: one number for all of them."""


class Residency:
    """Blocks x holders: a table of blocks, each with a bit mask of its holders. A block that was
    resident once and is nowhere now stays as a ghost until it is evicted, so that "never seen" and
    "evicted" are told apart; a prompt that was only asked for may never have been computed, and
    counts as never seen. Plain calls: atomic on an event loop."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._blocks = BlockTable()
        """A hash is a chain: it names the whole path to its block, which one look-up finds."""
        self._leaves = LeafQueue()
        self._clock = 0
        self._blocks_since_tick = 0
        self._bits = HolderBits()
        self._resident: dict[Holder, int] = {}
        self._links = 0
        """Their sum."""
        self._masks = SharedMasks()
        self._evicted = 0
        self._evicted_resident = 0
        self._unplaced = 0

    def match(self, hashes: Sequence[BlockHash]) -> Match:
        """How much of a prompt is where. Reads only."""
        return self._match(self._known(hashes))

    def was_resident(self, block_hash: BlockHash) -> bool | None:
        """Whether any holder has had the block; None when it is unknown here."""
        block = self._blocks.get(block_hash)
        return None if block is None else bool(block.holders & ONCE_RESIDENT)

    def has(self, holder: Holder, block_hash: BlockHash) -> bool:
        """Whether `holder` has the block."""
        block = self._blocks.get(block_hash)
        return block is not None and bool(block.holders & self._bits.find(holder))

    def num_resident(self, holder: Holder) -> int:
        """Blocks that `holder` has."""
        return self._resident.get(holder, 0)

    @property
    def evicted_resident(self) -> int:
        """Blocks forgotten although somebody had them, since the start."""
        return self._evicted_resident

    def see(self, hashes: Sequence[BlockHash]) -> Match:
        """Remember a prompt's blocks, and that they were used now; what was known before, from
        the same walk. Exceeds the capacity by no more than this one prompt while it runs."""
        known = self._known(hashes)
        match = self._match(known)
        self._tick()
        time = self._clock
        for block in known:
            block.last_used = time
        if len(known) < len(hashes):
            self._extend(known[-1] if known else None, hashes[len(known) :], 0, [])
            self._evict()
        return match

    def store(
        self, holder: Holder, parent: BlockHash | None, hashes: Sequence[BlockHash]
    ) -> list[BlockHash]:
        """`holder` has the run `hashes` below `parent` (None: the start of a prompt) from now on.
        Blocks whose parent was forgotten here are left out and counted.

        Gives the hashes as they are kept here: equal ones, of which a map of the caller's needs no
        second copy. Empty when they were left out.
        """
        above = None
        if parent is not None:
            above = self._blocks.get(parent)
            if above is None:
                self._unplaced += len(hashes)
                return []
        self._blocks_since_tick += len(hashes)
        if self._blocks_since_tick >= _BLOCKS_PER_TICK:
            self._tick()
        kept: list[BlockHash] = []
        added = self._extend(above, hashes, self._bits.take(holder) | ONCE_RESIDENT, kept)
        self._resident[holder] = self._resident.get(holder, 0) + added
        self._links += added
        self._evict()
        return kept

    def remove(self, holder: Holder, block_hash: BlockHash) -> None:
        """`holder` has the block no more. Unknown blocks are ignored."""
        bit = self._bits.find(holder)
        self._remove(holder, bit, self._blocks.get(block_hash))

    def clear(self, holder: Holder, hashes: Iterable[BlockHash] | None = None) -> None:
        """`holder` is empty or gone; its bit is free for another holder afterwards. `hashes`: all
        that it may have. Without them the whole index is walked: about 5 ms for 100,000 blocks."""
        bit = self._bits.find(holder)
        if not bit:
            return
        blocks: Iterable[KnownBlock | None] = self._blocks
        if hashes is not None:
            blocks = map(self._blocks.get, hashes)
        for block in blocks if self._resident[holder] else ():
            self._remove(holder, bit, block)
        del self._resident[holder]
        self._bits.free(holder)

    def stats(self) -> ResidencyStats:
        return ResidencyStats(
            nodes=len(self._blocks),
            resident_blocks=dict(self._resident),
            memory_bytes=self._memory_bytes,
            capacity_bytes=self._capacity_bytes,
            evicted=self._evicted,
            evicted_resident=self._evicted_resident,
            unplaced=self._unplaced,
        )

    @property
    def _memory_bytes(self) -> int:
        return (
            len(self._blocks) * BLOCK_BYTES
            + self._links * LINK_BYTES
            + len(self._leaves) * ENTRY_BYTES
            + self._masks.memory_bytes
        )

    def _tick(self) -> None:
        self._clock += 1
        self._blocks_since_tick = 0

    def _known(self, hashes: Sequence[BlockHash]) -> list[KnownBlock]:
        """The longest run of `hashes`, from the first on, that is here."""
        found: list[KnownBlock] = []
        shards = self._blocks.shards
        for block_hash in hashes:
            block = shards[block_hash[0]].get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def _match(self, blocks: Sequence[KnownBlock]) -> Match:
        """What the holders have, and had, of a known run."""
        starts: list[tuple[int, int]] = []
        last = -1
        for position, block in enumerate(blocks):
            if block.holders != last:
                last = block.holders
                starts.append((position, last))
        starts.append((len(blocks), 0))
        seen = 0
        by_holder: dict[Holder, int] = {}
        have_all = starts[0][1]
        for start, mask in starts:
            # Holders whose runs end here. Later ends are longer, and count where a holder is both
            # known and assumed to have something.
            if lost := have_all & ~mask:
                have_all &= mask
                seen = start if lost & ONCE_RESIDENT else seen
                by_holder.update(dict.fromkeys(self._bits.named(lost), start))
        stretches = tuple(
            Stretch(start, end, self._bits.named(mask))
            for (start, mask), (end, _) in itertools.pairwise(starts)
        )
        return Match(seen, by_holder, stretches)

    def _extend(
        self,
        above: KnownBlock | None,
        hashes: Sequence[BlockHash],
        gained: int,
        kept: list[BlockHash],
    ) -> int:
        """Blocks below `above`, with at least the bits `gained`. How many had them not before."""
        shards, position, num_gained = self._blocks.shards, 0, 0
        while position < len(hashes):
            block_hash = hashes[position]
            block = shards[block_hash[0]].get(block_hash)
            if block is None:
                num_new = self._append(above, hashes[position:], gained, kept)
                position += num_new
                num_gained += num_new
                above = self._blocks.get(kept[-1])
                continue
            if block.holders & gained != gained:
                block.holders = self._masks.shared(block.holders | gained)
                num_gained += 1
            kept.append(block.hash)
            above = block
            position += 1
        return num_gained

    def _append(
        self,
        above: KnownBlock | None,
        hashes: Sequence[BlockHash],
        gained: int,
        kept: list[BlockHash],
    ) -> int:
        """As many of them as are new, at least the first one. Usually all are: only where hashes
        collide a chain runs into another one."""
        shards, time, gained = self._blocks.shards, self._clock, self._masks.shared(gained)
        parent = None
        if above is not None:
            parent = above.hash
            above.children += 1
        num_new = len(hashes)
        for position, block_hash in enumerate(hashes):
            # As if another one came below it.
            block = KnownBlock(block_hash, parent, gained, 1, time, False)
            if shards[block_hash[0]].setdefault(block_hash, block) is not block:
                num_new = position
                break
            above, parent = block, block_hash
        if above is not None:
            above.children = 0
            self._leaves.add(above)
        self._blocks.count(num_new)
        kept.extend(hashes[:num_new])
        return num_new

    def _remove(self, holder: Holder, bit: int, block: KnownBlock | None) -> None:
        if block is not None and block.holders & bit:
            block.holders = self._masks.shared(block.holders & ~bit)
            self._resident[holder] -= 1
            self._links -= 1

    def _evict(self) -> None:
        if self._masks.is_crowded(len(self._blocks)):
            self._masks.keep(block.holders for block in self._blocks)
        while (excess := self._memory_bytes - self._capacity_bytes) > 0:
            block = self._leaves.pop()
            if block is None:
                return
            self._evict_tail(block, excess)

    def _evict_tail(self, block: KnownBlock, excess: int) -> None:
        """A leaf, and what above it would be next: most of an old prompt in one go."""
        shards, next_time = self._blocks.shards, self._leaves.next_time
        mask, run = block.holders, 0
        bytes_each = _bytes_with(mask)
        while True:
            del shards[block.hash[0]][block.hash]
            if block.holders != mask:
                self._count_evicted(mask, run)
                mask, run = block.holders, 0
                bytes_each = _bytes_with(mask)
            run += 1
            excess -= bytes_each
            if block.parent is None:
                break
            above = shards[block.parent[0]][block.parent]
            above.children -= 1
            if above.children or above.queued:
                break
            if excess <= 0 or (next_time is not None and above.last_used > next_time):
                self._leaves.add(above)
                break
            block = above
        self._count_evicted(mask, run)

    def _count_evicted(self, mask: int, count: int) -> None:
        """So many blocks with these holders are gone."""
        self._blocks.count(-count)
        self._evicted += count
        if mask <= ONCE_RESIDENT:
            return
        self._evicted_resident += count
        for holder in self._bits.of(mask):
            self._resident[holder] -= count
            self._links -= count


def _bytes_with(mask: int) -> int:
    """Memory of a block with these holders."""
    return BLOCK_BYTES + (mask & ~ONCE_RESIDENT).bit_count() * LINK_BYTES

"""Blocks on their way down: memory keeps some room free, and offers its victims to the tier below
before they go."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence

from prefix_store.base import BlockHash
from prefix_store.index import Node
from prefix_store.lower_tier import LowerTier
from prefix_store.memory_tier import MemoryTier, StoredBlock
from prefix_store.offers import NOTHING, Offer
from prefix_store.record import read_header

logger = logging.getLogger(__name__)

HEADROOM_SHARE = 8
"""One part in so many of memory is kept free for what comes next."""

MAX_SAVED = 4096
"""Saved runs that wait to be copied down; older ones go down when they are evicted."""

PROBE_EVERY_S = 5.0
"""A tier that nobody read from for so long is measured again: a policy that never loads would
never learn that the tier has become fast."""

PAUSE_S = 0.05


class Demotions:
    """Runs while the store runs; see `run`."""

    def __init__(
        self,
        memory: MemoryTier,
        lower: Sequence[LowerTier],
        on_save: Sequence[LowerTier],
        clock: Callable[[], float],
    ) -> None:
        self._memory = memory
        self._lower = lower
        self.on_save = on_save
        self._clock = clock
        self._pressure = asyncio.Event()
        self._work = asyncio.Event()
        self._saved: OrderedDict[BlockHash, None] = OrderedDict()

    @property
    def headroom_bytes(self) -> int:
        return self._memory.capacity_bytes // HEADROOM_SHARE

    def saved(self, last: BlockHash) -> None:
        """A run that ends with this block is in memory now."""
        if self.on_save:
            self._saved[last] = None
            if len(self._saved) > MAX_SAVED:
                self._saved.popitem(last=False)
            self._work.set()

    def check_room(self) -> None:
        """Memory has become fuller."""
        if self._memory.free_bytes < self.headroom_bytes:
            self._pressure.set()

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._forever(self._keep_room))
            tasks.create_task(self._forever(self._copy_saved))
            tasks.create_task(self._forever(self._probe))

    async def _forever(self, step: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await step()
            except Exception:
                # The outermost boundary: a fault below memory must not end the store.
                logger.exception("moving blocks between tiers failed")
                await asyncio.sleep(1.0)

    async def _keep_room(self) -> None:
        await self._pressure.wait()
        self._pressure.clear()
        while self._memory.free_bytes < self.headroom_bytes:
            node = self._memory.next_victim(self._clock())
            if node is None:  # everything is in use
                await asyncio.sleep(PAUSE_S)
                self._pressure.set()
                return
            last_used = node.last_used
            if node.hash not in self._lower[0]:
                await self._copy(node, self._lower[0])
            if node.last_used == last_used:
                self._memory.evict(node)
            else:
                self._memory.reconsider(node.hash)
            await asyncio.sleep(0)

    async def _copy_saved(self) -> None:
        await self._work.wait()
        self._work.clear()
        while self._saved:
            last, _ = self._saved.popitem(last=False)
            for tier in self.on_save:
                node = self._memory.get(last)
                if node is not None and last not in tier:
                    await self._copy(node, tier)

    async def _probe(self) -> None:
        await asyncio.sleep(PROBE_EVERY_S)
        for tier in self._lower:
            if not tier.ready:
                await tier.start()
            elif tier.read_at + PROBE_EVERY_S < self._clock():
                await tier.probe()

    async def _copy(self, node: Node[StoredBlock], tier: LowerTier) -> None:
        """Offer a block and its ancestors, all of which memory has. Only what the tier lacks is
        held and looked at: chains are long."""
        chain = node.lineage()
        wanted = tier.wanted([each.hash for each in chain], node.access)
        if not wanted:
            return
        held = chain[wanted.start :]
        self._memory.hold(held)
        try:
            offers = [_known(each) for each in chain[: wanted.start]]
            offers += [self._offer(each) for each in held]
            await tier.keep(offers, node.access)
        finally:
            self._memory.let_go(held)

    def _offer(self, node: Node[StoredBlock]) -> Offer:
        data = self._memory.record(node)
        header = read_header(data)
        tokens = header.token_ids if header is not None else b""
        return Offer(node.hash, node.parent_hash, tokens, node.value.salt, data)


def _known(node: Node[StoredBlock]) -> Offer:
    """Of a block that the tier has."""
    return Offer(node.hash, node.parent_hash, b"", node.value.salt, NOTHING)

"""Blocks on their way up into memory, and the leases that wait for them.

Places in memory are reserved at once, so that the engine knows where the blocks will lie; each
becomes visible when it has arrived and was checked. Two requests that want the same blocks wait for
one transfer.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from policies.access import Access
from prefix_store.backend import KeptBlock
from prefix_store.base import BlockHash
from prefix_store.extents import Extent
from prefix_store.load_limit import LoadLimit
from prefix_store.lower_tier import LowerTier
from prefix_store.memory_tier import MemoryTier
from prefix_store.reservations import Place

logger = logging.getLogger(__name__)

WRITER = 0
"""Names the store itself among those who reserve places."""

KEPT_S = 60.0
"""An arrival whose lease nobody released by then is forgotten."""


@dataclass(frozen=True, slots=True)
class Upward:
    """A block that shall come up, and from where."""

    block_hash: BlockHash
    tier: LowerTier


@dataclass(slots=True)
class _Coming:
    block_hash: BlockHash
    tier: LowerTier
    place: Place
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    waiting: list[_Arrival] = field(default_factory=list)


@dataclass(slots=True)
class _Arrival:
    """What one lease waits for, in the order of its prompt."""

    lease: int
    began: float
    num_blocks: int
    arrived: int = 0
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Progress:
    """Of one lease."""

    arrived: int
    done: bool


class Promotions:
    """Owns the transfers under way; bounded by the room in memory."""

    def __init__(self, memory: MemoryTier, view: memoryview, clock: Callable[[], float]) -> None:
        self._memory = memory
        self._view = view
        self._clock = clock
        self._coming: dict[BlockHash, _Coming] = {}
        self._arrivals: dict[int, _Arrival] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def begin(
        self,
        parent: BlockHash | None,
        blocks: Sequence[Upward],
        record_bytes: int,
        access: Access,
        give_up_s: float | None,
    ) -> list[Extent]:
        """Start bringing a run up that hangs below `parent` in memory (None: it starts a prompt);
        where its blocks will lie, as far as there is room."""
        now = self._clock()
        hashes = [block.block_hash for block in blocks]
        if self._closed:
            return []
        # However long a read takes, nobody else may get a place that it writes to: the places are
        # given back by `_bring`, which always ends, and never expire.
        places = self._memory.reserve(
            parent, hashes, record_bytes, now, writer=WRITER, access=access, kept_s=math.inf
        )
        extents: list[Extent] = []
        own: list[_Coming] = []
        for block, place in zip(blocks, places, strict=True):
            coming = self._coming.get(block.block_hash)
            if place is not None:
                coming = _Coming(block.block_hash, block.tier, place)
                self._coming[block.block_hash] = coming
                own.append(coming)
            if coming is None:
                break
            extents.append(coming.place.extent)
        self._memory.cancel([p.ticket for p in places[len(extents) :] if p is not None])
        if own:
            first = hashes.index(own[0].block_hash)
            above = hashes[first - 1] if first else parent
            before = self._coming.get(above) if above is not None else None
            task = asyncio.get_running_loop().create_task(
                self._bring(own, before, access, give_up_s)
            )
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return extents

    def wait_for(self, lease: int, hashes: Sequence[BlockHash]) -> None:
        """The lease shall cover these blocks as they arrive; they were begun just now."""
        arrival = _Arrival(lease, self._clock(), len(hashes))
        self._arrivals[lease] = arrival
        for block_hash in hashes:
            self._coming[block_hash].waiting.append(arrival)

    def progress(self, lease: int) -> Progress:
        """How much of what a lease waits for is there."""
        arrival = self._arrivals.get(lease)
        if arrival is None:
            return Progress(0, done=True)
        done = arrival.failed or arrival.arrived == arrival.num_blocks
        return Progress(arrival.arrived, done)

    def forget(self, lease: int) -> None:
        """Nobody waits for this lease any more. The transfer goes on: others may want it."""
        self._arrivals.pop(lease, None)

    def expire(self) -> None:
        """Forget arrivals whose owner is gone."""
        oldest = self._clock() - KEPT_S
        for lease in [k for k, arrival in self._arrivals.items() if arrival.began < oldest]:
            del self._arrivals[lease]

    async def close(self) -> None:
        """Give all transfers up, and begin no more: the arena goes next."""
        self._closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _bring(
        self,
        blocks: Sequence[_Coming],
        before: _Coming | None,
        access: Access,
        give_up_s: float | None,
    ) -> None:
        num_settled = 0
        limit = LoadLimit(give_up_s)

        def arrived(kept: Sequence[KeptBlock]) -> None:
            nonlocal num_settled
            there = blocks[num_settled : num_settled + len(kept)]
            self._memory.commit([each.place.ticket for each in there], kept[0].salt, access)
            for coming in there:
                self._settle(coming)
                num_settled += 1
            limit.note(num_settled / len(blocks))

        try:
            async with limit.timeout:
                if before is not None:
                    await before.settled.wait()
                limit.begin()
                for tier, group in itertools.groupby(blocks, lambda coming: coming.tier):
                    run = list(group)
                    views = [self._view_of(coming.place) for coming in run]
                    kept = await tier.read([c.block_hash for c in run], views, arrived)
                    if None in kept:
                        return
        except TimeoutError:
            logger.info("a load takes longer than computing would; the rest is computed")
        except Exception:
            # The outermost boundary of this task: what did not arrive is computed.
            logger.exception("a load from below memory failed")
        finally:
            rest = blocks[num_settled:]
            self._memory.cancel([coming.place.ticket for coming in rest])
            for coming in rest:
                self._settle(coming)

    def _settle(self, coming: _Coming) -> None:
        """It is in memory now, or it never will be."""
        del self._coming[coming.block_hash]
        coming.settled.set()
        for arrival in coming.waiting:
            if arrival.failed:
                continue
            if self._memory.add_to_lease(arrival.lease, coming.block_hash):
                arrival.arrived += 1
            else:
                arrival.failed = True

    def _view_of(self, place: Place) -> memoryview:
        start = place.extent.offset
        return self._view[start : start + place.extent.num_bytes]

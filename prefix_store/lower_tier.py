"""A tier below memory: a catalogue with its policies over a backend that keeps the bytes.

used + being written <= capacity at every moment. Every tier is closed under prefixes by itself: a
block comes with the ancestors that are not here yet, and tails go first.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from policies.access import Access
from policies.admission import AdmissionGate
from policies.eviction.retained import let_all_in
from policies.transfer_rate import TransferRate
from prefix_store.backend import Arrived, Backend, KeptBlock, OutgoingRecord
from prefix_store.base import BlockHash, StoreUnavailableError
from prefix_store.events import KVEvent
from prefix_store.index import Eviction, Node, RadixIndex
from prefix_store.offers import NOTHING, Offer, offer_of, slices, with_data
from prefix_store.pins import Pins, order_by
from prefix_store.tier_counters import Removal, TierCounters
from prefix_store.tier_events import Announced, removed_event, stored_events

logger = logging.getLogger(__name__)

PROBE_BYTES = 2 * 1024**2
PROBE_S = 0.1
"""About what a probe reads, a run of blocks: so many bytes, or what the tier gives in such a time
if that is less. On a slow link others would wait for more."""


@dataclass(slots=True)
class LowerCounters(TierCounters):
    """Since the start; bytes are those of records."""

    bytes_written: int = 0
    bytes_read: int = 0


@dataclass(frozen=True, slots=True)
class LowerTierSettings:
    """What the configuration says of a tier."""

    name: str
    medium: str
    """In events."""
    capacity_bytes: int
    eviction: Eviction
    shared: bool
    """Other stores write there too: what is there is asked of the backend."""


@dataclass(slots=True)
class _Room:
    used_bytes: int = 0
    reserved_bytes: int = 0


class LowerTier:
    """Asynchronous where bytes move; the catalogue changes in plain calls only."""

    def __init__(
        self,
        settings: LowerTierSettings,
        backend: Backend,
        gate: AdmissionGate,
        publish: Callable[[list[KVEvent]], None],
        *,
        below: LowerTier | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.gate = gate
        self._backend = backend
        self._publish = publish
        self._below = below
        self._clock = clock
        self._index: RadixIndex[KeptBlock] = RadixIndex(self._order(settings))
        self._room = _Room()
        self._keeping = asyncio.Lock()
        self.reads = TransferRate()
        self.writes = TransferRate()
        self.counters = LowerCounters()
        self.read_at = float("-inf")
        self.ready = False
        """Whether it has started; before that it keeps nothing."""
        self._is_late = False

    def __len__(self) -> int:
        return len(self._index)

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._index

    @property
    def faults(self) -> int:
        return self._backend.faults

    @property
    def breaker(self) -> str:
        return self._backend.breaker

    @property
    def is_up(self) -> bool:
        """Whether the medium is asked at all now."""
        return self._backend.breaker in ("", "closed")

    @property
    def used_bytes(self) -> int:
        """Of the catalogue, and of what is being removed."""
        return self._room.used_bytes

    @property
    def reserved_bytes(self) -> int:
        """Being written."""
        return self._room.reserved_bytes

    @property
    def free_bytes(self) -> int:
        return self.settings.capacity_bytes - self._room.used_bytes - self._room.reserved_bytes

    async def start(self) -> None:
        """Take over what lies there from earlier. A medium that does not answer is not waited for:
        call it again (see `ready`). Raises StoreError when nothing can be kept there at all."""
        try:
            recovered = await self._backend.recover()
        except StoreUnavailableError as error:
            logger.warning("%s", error)
            self._is_late = True
            return
        self.ready = True
        nodes = [self._enter(block, Access()) for block in recovered]
        if self._is_late:  # whoever follows the events has his picture of the store already
            self._publish(self.events_of(nodes))
        async with self._keeping:
            while self.free_bytes < 0:
                if not await self._evict_one(pass_on=False):
                    break
        if recovered:
            logger.info("%s: %d blocks are back", self.settings.name, len(self._index))

    async def close(self) -> None:
        await self._backend.close()

    def match(self, hashes: Sequence[BlockHash], access: Access) -> int:
        """How much of a prefix the catalogue has; that is a use of it."""
        nodes = self._index.match(hashes)
        self._index.touch(nodes, access)
        self.counters.matches += 1
        self.counters.blocks_asked += len(hashes)
        self.counters.blocks_matched += len(nodes)
        return len(nodes)

    async def count(self, hashes: Sequence[BlockHash]) -> int:
        """How much of a prefix is there, whoever wrote it."""
        return await self._backend.count(hashes)

    def wanted(self, hashes: Sequence[BlockHash], access: Access) -> range:
        """Which blocks of a run that starts a prompt `keep` would try to take in now."""
        known = len(self._index.match(hashes))
        if known == len(hashes) or not (self.ready and self.is_up):
            return range(known, known)
        admitted = self.gate.admit(hashes, access)
        if admitted <= known:
            self.counters.blocks_refused += len(hashes) - known
        return range(known, max(known, admitted))

    async def keep(self, offers: Sequence[Offer], access: Access) -> int:
        """Take in a run that starts a prompt, as far as it is admitted and there is room; returns
        how many of its blocks are here afterwards. Nothing goes to make room while the medium
        does not work."""
        if not (self.ready and self.is_up):
            return 0
        async with self._keeping:
            known = self._index.match([offer.block_hash for offer in offers])
            missing = list(offers[len(known) :])
            if not missing:
                return len(known)
            admitted = self.gate.admit([offer.block_hash for offer in offers], access)
            self.counters.blocks_refused += len(offers) - max(admitted, len(known))
            missing = with_data(missing[: max(0, admitted - len(known))])
            held = list(known)
            self._index.lease(held)
            try:
                for batch in slices(missing, lambda offer: len(offer.data)):
                    written = await self._write(batch, access)
                    self._index.lease(written)
                    held += written
                    if len(written) < len(batch):
                        break
            finally:
                self._index.release(held)
            return len(held)

    async def read(
        self,
        hashes: Sequence[BlockHash],
        into: Sequence[memoryview],
        arrived: Arrived | None = None,
    ) -> list[KeptBlock | None]:
        """Read and check records; `arrived` hears of them as they come. What is not there any more
        leaves the catalogue; but a shared medium that does not answer has lost nothing."""
        held = [node for node in map(self._index.get, hashes) if node is not None]
        self._index.lease(held)
        faults = self._backend.faults
        began = time.perf_counter()
        num_arrived = 0
        first_s: float | None = None

        def note(blocks: Sequence[KeptBlock]) -> None:
            nonlocal num_arrived, first_s
            if first_s is None:
                first_s = time.perf_counter() - began
            num_arrived += len(blocks)
            self.counters.bytes_read += sum(block.record_bytes for block in blocks)
            if arrived is not None:
                arrived(blocks)

        try:
            blocks = await self._backend.read(hashes, into, note)
        except asyncio.CancelledError:
            begun = into[: num_arrived + 1]  # the last of them has not come yet
            self._was_given_up(sum(map(len, begun)), time.perf_counter() - began)
            raise
        finally:
            self._index.release(held)
        self.read_at = self._clock()
        num_bytes = sum(len(view) for block, view in zip(blocks, into, strict=True) if block)
        self.reads.observe(num_bytes, time.perf_counter() - began, first_s)
        if self.settings.shared and not (self.is_up and self._backend.faults == faults):
            return blocks
        for block_hash, block in zip(hashes, blocks, strict=True):
            if block is None:
                await self.drop(block_hash)
        return blocks

    async def drop(self, block_hash: BlockHash, reason: Removal = Removal.CORRUPT) -> None:
        """Take a block and what hangs below it out."""
        gone = self._index.remove(block_hash)
        await self._take_out(gone, reason)

    async def clear(self) -> int:
        """Take everything out that nobody reads or writes."""
        gone: list[Node[KeptBlock]] = []
        while (node := self._index.evict(self._clock())) is not None:
            gone.append(node)
        await self._take_out(gone, Removal.CLEARED)
        return len(gone)

    def load_s(self, num_bytes: int) -> float | None:
        """What reading so much would take; writes tell something while nothing was read."""
        seconds = self.reads.seconds(num_bytes)
        return seconds if seconds is not None else self.writes.seconds(num_bytes)

    async def probe(self) -> None:
        """Read some blocks, only to see how fast that is now: of one alone most of the time would
        be what a run of them takes once."""
        newest = self._index.newest()
        if newest is None:
            return
        rate = self.reads.bytes_per_s or self.writes.bytes_per_s
        enough = min(PROBE_BYTES, PROBE_S * rate) if rate else PROBE_BYTES
        nodes, num_bytes = [newest], newest.value.record_bytes
        while num_bytes < enough and (above := nodes[-1].parent) is not None:
            nodes.append(above)
            num_bytes += above.value.record_bytes
        nodes.reverse()
        buffers = [memoryview(bytearray(node.value.record_bytes)) for node in nodes]
        await self.read([node.hash for node in nodes], buffers)

    def visible(self) -> list[Node[KeptBlock]]:
        """All blocks of the catalogue, parents first."""
        return list(self._index.nodes())

    def events_of(self, nodes: Sequence[Node[KeptBlock]]) -> list[KVEvent]:
        """Those of `nodes` that are still here, as events."""
        here = [node for node in nodes if self._index.get(node.hash) is node]
        return stored_events([_announced(node) for node in here], self.settings.medium)

    @property
    def pins(self) -> Pins[KeptBlock]:
        return Pins(self.settings.name, self._index)

    def reconsider(self, block_hash: BlockHash) -> None:
        """What is known of a block's last use has changed."""
        node = self._index.get(block_hash)
        if node is not None:
            self._index.reconsider(node)

    async def apply(self, settings: LowerTierSettings, gate: AdmissionGate) -> None:
        """Other policies and another quota from now on; blocks stay, as far as the quota lets."""
        if settings.eviction != self.settings.eviction:
            order_by(self._index, self._order(settings), self._clock())
        self.settings, self.gate = settings, gate
        self._backend.resize(settings.capacity_bytes)
        async with self._keeping:
            while self.free_bytes < 0:
                if not await self._evict_one(pass_on=True):
                    break

    async def _write(self, batch: Sequence[Offer], access: Access) -> list[Node[KeptBlock]]:
        """Blocks of the batch that are here now; all of them were missing."""
        outgoing: list[OutgoingRecord] = []
        entered: list[Node[KeptBlock]] = []
        try:
            for offer in batch:
                size = self._backend.size_of(len(offer.data))
                if not await self._make_room(size, offer, access):
                    self.counters.blocks_refused += len(batch) - len(outgoing)
                    break
                self._room.reserved_bytes += size
                outgoing.append(OutgoingRecord(offer.kept(size), offer.data))
            began = time.perf_counter()
            written = await self._backend.write(outgoing) if outgoing else []
            num_bytes = sum(len(r.data) for r, ok in zip(outgoing, written, strict=True) if ok)
            self.writes.observe(num_bytes, time.perf_counter() - began)
            self.counters.bytes_written += num_bytes
            for record, ok in zip(outgoing, written, strict=True):
                if not ok or not self._has_parent(record.block):
                    break
                entered.append(self._enter(record.block, access))
                self._room.reserved_bytes -= record.block.num_bytes
            if entered:  # at once: whoever takes them out again says so after this
                self.counters.blocks_stored += len(entered)
                announced = [_announced(node) for node in entered]
                self._publish(stored_events(announced, self.settings.medium))
            strays = [r.block.block_hash for r, ok in zip(outgoing, written, strict=True) if ok]
            await self._backend.remove(strays[len(entered) :])
        finally:
            rest = outgoing[len(entered) :]
            self._room.reserved_bytes -= sum(record.block.num_bytes for record in rest)
        return entered

    def _order(self, settings: LowerTierSettings) -> Eviction:
        return settings.eviction if self._below is None else let_all_in(settings.eviction)

    async def _make_room(self, size: int, offer: Offer, access: Access) -> bool:
        newcomer = Node(
            offer.block_hash, None, offer.kept(size), 0,
            access=access, num_tokens=len(offer.token_ids) // 4, num_bytes=size,
        )  # fmt: skip
        while self.free_bytes < size:
            if not self._index.admits(newcomer, self._clock()):
                return False
            if not await self._evict_one(pass_on=True):
                return False
        return True

    async def _evict_one(self, *, pass_on: bool) -> bool:
        node = self._index.candidate(self._clock())
        if node is None:
            return False
        if pass_on and self._below is not None and node.hash not in self._below:
            self._index.lease([node])
            try:
                await self._pass_on(node, self._below)
            finally:
                self._index.release([node])
        if node.leases or not node.is_leaf or self._index.get(node.hash) is not node:
            return True  # somebody uses it since, or it is gone
        await self._take_out(self._index.remove(node.hash), Removal.CAPACITY)
        return True

    async def _pass_on(self, node: Node[KeptBlock], below: LowerTier) -> None:
        """Offer a block, and its ancestors that are not there, to the tier below."""
        chain = node.lineage()
        wanted = below.wanted([each.hash for each in chain], node.access)
        num_below = wanted.start
        for batch in slices(
            chain[wanted.start : wanted.stop], lambda node: node.value.record_bytes
        ):
            views = [memoryview(bytearray(each.value.record_bytes)) for each in batch]
            blocks = await self._backend.read([each.hash for each in batch], views)
            whole = next((i for i, b in enumerate(blocks) if b is None), len(blocks))
            offers = [offer_of(each.value, NOTHING) for each in chain[:num_below]]
            offers += [
                offer_of(each.value, view) for each, view in zip(batch[:whole], views, strict=False)
            ]
            num_below += whole
            num_kept = await below.keep(offers, node.access)
            if whole < len(batch):
                await self.drop(batch[whole].hash)
            if num_kept < num_below or whole < len(batch):
                return

    def _was_given_up(self, num_bytes: int, seconds: float) -> None:
        """A read that took so long, at least: whoever gave it up shall not try the same again."""
        expected = self.load_s(num_bytes)
        if expected is None or seconds > expected:
            self.reads.observe(num_bytes, seconds)

    def _has_parent(self, block: KeptBlock) -> bool:
        """It may have been dropped while its child was written."""
        return block.parent is None or block.parent in self._index

    def _enter(self, block: KeptBlock, access: Access) -> Node[KeptBlock]:
        node = self._index.insert(
            block.parent, block.block_hash, block,
            access=access, num_tokens=block.num_tokens, num_bytes=block.num_bytes,
        )  # fmt: skip
        self._room.used_bytes += block.num_bytes
        return node

    async def _take_out(self, gone: Sequence[Node[KeptBlock]], reason: Removal) -> None:
        """Remove what has left the catalogue; its room stays taken until that is done."""
        if not gone:
            return
        self.counters.removals[reason] += len(gone)
        hashes = [node.hash for node in gone]
        self._publish([removed_event(hashes, self.settings.medium)])
        try:
            await self._backend.remove(hashes)
        finally:
            self._room.used_bytes -= sum(node.value.num_bytes for node in gone)


def _announced(node: Node[KeptBlock]) -> Announced:
    block = node.value
    return Announced(block.block_hash, block.parent, block.token_ids, block.salt)

"""The memory tier: which block lies where in the arena, who reads it, who writes it.

free + used + reserved = capacity at every moment. A block is visible only after its commit; a
leased block is never moved or overwritten, not even after it was dropped.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from policies.access import NO_ACCESS, Access
from policies.admission import all_of
from policies.config import MemoryTierConfig, pin_budget_of
from policies.eviction.retained import Retained, let_all_in
from prefix_store import events
from prefix_store.base import BlockHash
from prefix_store.extents import Extent, ExtentAllocator
from prefix_store.index import Eviction, Node, RadixIndex
from prefix_store.pins import Pins, order_by
from prefix_store.record import RecordHeader, read_header
from prefix_store.reservations import Place, Reservation, Reservations
from prefix_store.tier_counters import Removal, TierCounters
from prefix_store.tier_events import Announced, removed_event, stored_events

RESERVATION_S = 60.0
"""A writer that did not commit by then has lost its place."""

ABANDONED_S = 5.0
"""So long may a writer whose connection ended still be in the middle of a copy."""

MAX_LEASES = 65_536

MAX_SPARED = 16
"""Victims that are passed over in a hurry because they lie nowhere else yet."""


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """Where a visible block lies."""

    extent: Extent
    salt: str
    """Of the tenant; only with the first block of a prompt."""


@dataclass(frozen=True, slots=True)
class MatchedRun:
    """A prefix's resident run."""

    num_blocks: int
    lease: int
    """0: nothing was leased."""
    leased: Sequence[Extent]


@dataclass(slots=True)
class _Lease:
    nodes: list[Node[StoredBlock]]
    expires: float


class MemoryTier:
    """Pure bookkeeping over a view of the arena; every call is atomic. `now` is time.monotonic().
    `publish` gets what changed, in order."""

    def __init__(
        self,
        config: MemoryTierConfig,
        view: memoryview,
        lease_s: float,
        publish: Callable[[list[events.KVEvent]], None],
    ) -> None:
        self._config = config
        self._view = view
        self._lease_s = lease_s
        self._publish = publish
        self._gate = all_of(config.admission)
        self._space = ExtentAllocator(len(view))
        self._index: RadixIndex[StoredBlock] = RadixIndex(_eviction_of(config))
        self._leases: OrderedDict[int, _Lease] = OrderedDict()
        self._reservations = Reservations[StoredBlock]()
        self._dropped: dict[int, Node[StoredBlock]] = {}
        self._lease_ids = itertools.count(1)
        self.counters = TierCounters()
        self.is_below: Callable[[BlockHash], bool] = _everything
        """Whether the tier below has a block, so that nothing is lost when it goes."""
        self._is_last = True

    def __len__(self) -> int:
        return len(self._index)

    @property
    def capacity_bytes(self) -> int:
        return self._space.capacity_bytes

    @property
    def free_bytes(self) -> int:
        return self._space.free_bytes

    @property
    def reserved_bytes(self) -> int:
        return self._reservations.num_bytes

    @property
    def used_bytes(self) -> int:
        """Of visible blocks and of dropped ones that somebody still reads."""
        return self._space.used_bytes - self._reservations.num_bytes

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    @property
    def num_leased_blocks(self) -> int:
        return sum(len(lease.nodes) for lease in self._leases.values())

    def match(
        self,
        hashes: Sequence[BlockHash],
        lease_from: int,
        now: float,
        access: Access = NO_ACCESS,
    ) -> MatchedRun:
        """The resident run of a prefix; its blocks from `lease_from` on are leased."""
        nodes = self._index.match(hashes)
        self._index.touch(nodes, access)
        counters = self.counters
        counters.matches += 1
        counters.blocks_asked += len(hashes)
        counters.blocks_matched += len(nodes)
        wanted = nodes[lease_from:]
        lease = self.open_lease(wanted, now) if wanted else 0
        return MatchedRun(
            len(nodes), lease, [node.value.extent for node in wanted] if lease else ()
        )

    def open_lease(self, nodes: Sequence[Node[StoredBlock]], now: float) -> int:
        """A lease on blocks, to which more may be added; 0 when there are too many leases."""
        if len(self._leases) >= MAX_LEASES:
            return 0
        lease = next(self._lease_ids)
        self._index.lease(nodes)
        self._leases[lease] = _Lease(list(nodes), now + self._lease_s)
        return lease

    def add_to_lease(self, lease: int, block_hash: BlockHash) -> bool:
        """One more block for a lease; False when either is gone."""
        held, node = self._leases.get(lease), self._index.get(block_hash)
        if held is None or node is None:
            return False
        self._index.lease([node])
        held.nodes.append(node)
        return True

    def release(self, lease: int) -> None:
        """End a lease; unknown and expired ones are ignored."""
        held = self._leases.pop(lease, None)
        if held is not None:
            self._unlease(held.nodes)

    def reserve(
        self,
        parent: BlockHash | None,
        hashes: Sequence[BlockHash],
        record_bytes: int,
        now: float,
        *,
        writer: int = 0,
        access: Access = NO_ACCESS,
        kept_s: float = RESERVATION_S,
    ) -> list[Place | None]:
        """Room for a run of blocks below `parent` (None: the run starts a prompt). None stands for
        a block that is here or being written already, for one that is not admitted and for one
        that finds no room. `writer` names who asks (see `abandon`); the room is theirs for
        `kept_s`."""
        places: list[Place | None] = [None] * len(hashes)
        admitted = self._gate.admit(hashes, access)
        self.counters.blocks_refused += len(hashes) - admitted
        hashes = hashes[:admitted]
        held = self._index.get(parent) if parent is not None else None
        if parent is not None and held is None and parent not in self._reservations:
            self.counters.blocks_orphaned += len(hashes)
            return places
        for i, block_hash in enumerate(hashes):
            resident = self._index.get(block_hash)
            if resident is None and block_hash not in self._reservations:
                if held is not None:
                    self._index.lease([held])
                extent = self._make_room(block_hash, held, record_bytes, access, now)
                if extent is None:
                    if held is not None:
                        self._index.release([held])
                    self.counters.blocks_refused += len(hashes) - i
                    break
                places[i] = self._reservations.add(
                    Reservation(writer, block_hash, parent, extent, now + kept_s, held)
                )
            parent, held = block_hash, resident
        return places

    def commit(
        self, tickets: Sequence[int], salt: str, access: Access = NO_ACCESS
    ) -> BlockHash | None:
        """Make reserved blocks visible, in this order. What has no parent here, is here already or
        is not what was reserved is dropped. The last one that is new here is returned."""
        stored: list[Announced] = []
        for ticket in tickets:
            reservation = self._end_reservation(ticket)
            if reservation is None:
                continue
            announced = self._admit(reservation, salt, access)
            if announced is None:
                self._space.free(reservation.extent)
            else:
                stored.append(announced)
        if stored:
            self._publish(stored_events(stored, events.MEDIUM_MEMORY))
        return stored[-1].block_hash if stored else None

    def cancel(self, tickets: Sequence[int]) -> None:
        """Give reserved places back."""
        for ticket in tickets:
            reservation = self._end_reservation(ticket)
            if reservation is not None:
                self._space.free(reservation.extent)

    def abandon(self, writer: int, now: float) -> None:
        """A writer's connection has ended: its places are free again soon, so that whoever comes
        next can save the same blocks."""
        for reservation in self._reservations:
            if reservation.writer == writer:
                reservation.expires = min(reservation.expires, now + ABANDONED_S)

    def drop(self, block_hash: BlockHash, reason: Removal = Removal.CORRUPT) -> int:
        """Take a block and what hangs below it out; returns how many went."""
        return self._removed(self._index.remove(block_hash), reason)

    def clear(self) -> int:
        """Take everything out that nobody leases; returns how many blocks went."""
        gone: list[Node[StoredBlock]] = []
        while (node := self._index.evict()) is not None:
            gone.append(node)
        return self._removed(gone, Removal.CLEARED)

    def expire(self, now: float) -> None:
        """End leases and reservations whose time is over."""
        while self._leases:
            lease, held = next(iter(self._leases.items()))
            if held.expires > now:
                break
            self.release(lease)
            self.counters.leases_expired += 1
        late = self._reservations.late(now)
        self.cancel(late)
        self.counters.reservations_expired += len(late)

    def visible(self) -> list[Node[StoredBlock]]:
        """All blocks that can be matched now, parents first."""
        return list(self._index.nodes())

    def events_of(self, nodes: Sequence[Node[StoredBlock]]) -> list[events.KVEvent]:
        """Those of `nodes` that are still here, as events."""
        stored = []
        for node in nodes:
            header = read_header(self._record(node.value.extent))
            if header is not None and self._index.get(node.hash) is node:
                stored.append(_announced(node, header))
        return stored_events(stored, events.MEDIUM_MEMORY)

    def get(self, block_hash: BlockHash) -> Node[StoredBlock] | None:
        """A visible block."""
        return self._index.get(block_hash)

    def record(self, node: Node[StoredBlock]) -> memoryview:
        """The bytes of a block that the caller holds."""
        return self._record(node.value.extent)

    def next_victim(self, now: float) -> Node[StoredBlock] | None:
        """Who would go next. It is nobody's candidate until it was held and let go, or evicted."""
        return self._index.candidate(now)

    def hold(self, nodes: Sequence[Node[StoredBlock]]) -> None:
        """Protect blocks while the server itself reads them."""
        self._index.lease(nodes)

    def let_go(self, nodes: Sequence[Node[StoredBlock]]) -> None:
        """Undo one `hold`."""
        self._unlease(list(nodes))

    def evict(self, node: Node[StoredBlock]) -> bool:
        """Take one block out to make room; False when it may not go."""
        if node.leases or not node.is_leaf or self._index.get(node.hash) is not node:
            return False
        self._removed(self._index.remove(node.hash), Removal.CAPACITY)
        return True

    def apply(self, config: MemoryTierConfig, now: float) -> None:
        """Other policies from now on; the capacity stays as it was. A policy that has not changed
        keeps what it has learned."""
        if config.admission != self._config.admission:
            self._gate = all_of(config.admission)
        if _eviction_of(config) != _eviction_of(self._config):
            order_by(self._index, self._order(config), now)
        self._config = config

    def note(self, hashes: Sequence[BlockHash], access: Access) -> None:
        """Tell the admission policy what a request asked for."""
        self._gate.note(hashes, access)

    @property
    def pins(self) -> Pins[StoredBlock]:
        return Pins("memory", self._index)

    def stand_above(self, is_below: Callable[[BlockHash], bool]) -> None:
        """A tier lies below and has the blocks for which this is true."""
        self.is_below = is_below
        self._is_last = False
        order_by(self._index, self._order(self._config), 0.0)

    def _order(self, config: MemoryTierConfig) -> Eviction:
        eviction = _eviction_of(config)
        return eviction if self._is_last else let_all_in(eviction)

    def reconsider(self, block_hash: BlockHash) -> None:
        """What is known of a block's last use has changed."""
        node = self._index.get(block_hash)
        if node is not None:
            self._index.reconsider(node)

    def _admit(
        self, reservation: Reservation[StoredBlock], salt: str, access: Access
    ) -> Announced | None:
        block_hash, parent = reservation.block_hash, reservation.parent
        header = read_header(self._record(reservation.extent))
        if block_hash in self._index:
            self.counters.blocks_duplicate += 1
            return None
        if header is None or header.block_hash != block_hash:
            self.counters.blocks_refused += 1
            return None
        if parent is not None and parent not in self._index:
            self.counters.blocks_orphaned += 1
            return None
        block = StoredBlock(reservation.extent, salt if parent is None else "")
        self.counters.blocks_stored += 1
        node = self._index.insert(
            parent, block_hash, block,
            access=access, num_tokens=header.shape.num_tokens,
            num_bytes=reservation.extent.num_bytes,
        )  # fmt: skip
        return _announced(node, header)

    def _record(self, extent: Extent) -> memoryview:
        return self._view[extent.offset : extent.offset + extent.num_bytes]

    def _make_room(
        self,
        block_hash: BlockHash,
        parent: Node[StoredBlock] | None,
        num_bytes: int,
        access: Access,
        now: float,
    ) -> Extent | None:
        gone: list[Node[StoredBlock]] = []
        while (extent := self._space.allocate(num_bytes)) is None:
            if not self._index.admits(_newcomer(block_hash, parent, num_bytes, access), now):
                break
            victim = self._next_to_go(now)
            if victim is None:
                break
            self._index.remove(victim.hash)
            self._space.free(victim.value.extent)
            gone.append(victim)
        if gone:
            self._announce_removal(gone, Removal.CAPACITY)
        return extent

    def _next_to_go(self, now: float) -> Node[StoredBlock] | None:
        """The next victim; one that lies below already goes before some that would be lost."""
        spared: list[Node[StoredBlock]] = []
        while (victim := self._index.candidate(now)) is not None:
            if self.is_below(victim.hash):
                break
            spared.append(victim)
            if len(spared) == MAX_SPARED:
                break
        if spared and (victim is None or victim is spared[-1]):
            victim = spared.pop(0)
        for node in spared:
            self._index.reconsider(node)
        return victim

    def _end_reservation(self, ticket: int) -> Reservation[StoredBlock] | None:
        reservation = self._reservations.end(ticket)
        if reservation is not None and reservation.held_parent is not None:
            self._unlease([reservation.held_parent])
        return reservation

    def _unlease(self, nodes: list[Node[StoredBlock]]) -> None:
        self._index.release(nodes)
        for node in nodes:
            if node.leases == 0 and self._dropped.pop(id(node), None) is not None:
                self._space.free(node.value.extent)

    def _removed(self, nodes: list[Node[StoredBlock]], reason: Removal) -> int:
        for node in nodes:
            if node.leases:
                self._dropped[id(node)] = node
            else:
                self._space.free(node.value.extent)
        if nodes:
            self._announce_removal(nodes, reason)
        return len(nodes)

    def _announce_removal(self, nodes: list[Node[StoredBlock]], reason: Removal) -> None:
        self.counters.removals[reason] += len(nodes)
        self._publish([removed_event([node.hash for node in nodes], events.MEDIUM_MEMORY)])


def _eviction_of(config: MemoryTierConfig) -> Retained:
    return Retained(config.eviction, pin_budget_of(config))


def _everything(block_hash: BlockHash) -> bool:
    del block_hash
    return True


def _newcomer(
    block_hash: BlockHash, parent: Node[StoredBlock] | None, num_bytes: int, access: Access
) -> Node[StoredBlock]:
    """A block that is not here yet, for the policy to judge."""
    nowhere = StoredBlock(Extent(0, 0), "")
    return Node(block_hash, parent, nowhere, 0, access=access, num_bytes=num_bytes)


def _announced(node: Node[StoredBlock], header: RecordHeader) -> Announced:
    return Announced(node.hash, node.parent_hash, header.token_ids, node.value.salt)

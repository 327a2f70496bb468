"""One tier of the simulation: the real catalogue with its real policies, without the bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from policies.access import Access
from policies.admission import AdmissionGate, AlwaysGate
from policies.eviction.retained import let_all_in
from prefix_store.base import BlockHash
from prefix_store.index import Eviction, Node, RadixIndex

SimulatedNode = Node[None]


@dataclass(slots=True)
class TierCount:
    """Since the end of the warm-up."""

    hit_tokens: int = 0
    written_bytes: int = 0
    read_bytes: int = 0
    evicted_blocks: int = 0
    refused_blocks: int = 0


class SimulatedTier:
    """used <= capacity at every moment: room is made before a block comes in."""

    def __init__(
        self,
        name: str,
        capacity_bytes: int,
        eviction: Eviction,
        *,
        gate: AdmissionGate | None = None,
        write_on_save: bool = False,
        below: SimulatedTier | None = None,
    ) -> None:
        """`below` gets what is evicted here. `write_on_save`: blocks are offered to this tier as
        soon as they are computed, not only as the tier above evicts them."""
        self.name = name
        self.capacity_bytes = capacity_bytes
        self.gate = gate if gate is not None else AlwaysGate()
        self.write_on_save = write_on_save
        self.index: RadixIndex[None] = RadixIndex(
            eviction if below is None else let_all_in(eviction)
        )
        self.used_bytes = 0
        self.count = TierCount()
        self._below = below

    def match(self, chain: Sequence[BlockHash], access: Access) -> list[SimulatedNode]:
        """The resident run of a prefix; that is a use of it."""
        run = self.index.match(chain)
        self.index.touch(run, access)
        return run

    def take_in(
        self,
        run: Sequence[SimulatedNode],
        missing: Sequence[BlockHash],
        block: BlockShape,
        access: Access,
        now: float,
    ) -> int:
        """What follows `run` in its prompt has been computed or read: keep what the gate lets in.
        Returns how many blocks came in."""
        if not missing:
            return 0
        admitted = self.gate.admit(missing, access)
        inserted = self.insert(run, missing[:admitted], block, access, now)
        self.count.refused_blocks += len(missing) - inserted
        return inserted

    def insert(
        self,
        run: Sequence[SimulatedNode],
        newcomers: Sequence[BlockHash],
        block: BlockShape,
        access: Access,
        now: float,
    ) -> int:
        """Add `newcomers` below `run`, as far as there is room and the policy finds them worth it;
        returns how many came in. The last one is always leased: nothing of the prompt may go to
        make room for the rest of it, and its ancestors are no leaves."""
        index = self.index
        size = block.num_bytes
        tail = run[-1] if run else None
        if tail is not None:
            index.lease((tail,))
        inserted = 0
        for name in newcomers:
            if self.used_bytes + size > self.capacity_bytes and not self._make_room(
                Node(
                    name, tail, None, 0,
                    access=access, num_tokens=block.num_tokens, num_bytes=size,
                ),
                now,
            ):  # fmt: skip
                break
            node = index.insert(
                tail.hash if tail is not None else None, name, None,
                access=access, num_tokens=block.num_tokens, num_bytes=size,
            )  # fmt: skip
            self.used_bytes += size
            index.lease((node,))
            if tail is not None:
                index.release((tail,))
            tail = node
            inserted += 1
        if tail is not None:
            index.release((tail,))
        self.count.written_bytes += inserted * size
        return inserted

    def offer(
        self, chain: Sequence[BlockHash], block: BlockShape, access: Access, now: float
    ) -> int:
        """A run that starts a prompt may be kept here, if the gate lets it in. Returns how many of
        its blocks are here afterwards."""
        run = self.index.match(chain)
        admitted = self.gate.admit(chain, access)
        if admitted <= len(run):
            return len(run)
        return len(run) + self.insert(run, chain[len(run) : admitted], block, access, now)

    def save(
        self, chain: Sequence[BlockHash], block: BlockShape, access: Access, now: float
    ) -> None:
        """A request's whole run is offered as soon as it was computed."""
        self.count.refused_blocks += len(chain) - self.offer(chain, block, access, now)

    def receive(self, gone: SimulatedNode, now: float) -> None:
        """The tier above evicted a block; it comes with the ancestors that are missing here."""
        if gone.hash in self.index:
            return
        chain = [node.hash for node in gone.lineage()]
        block = BlockShape(gone.num_tokens, gone.num_bytes)
        if self.offer(chain, block, gone.access, now) < len(chain):
            self.count.refused_blocks += 1

    def reconsider(self, chain: Sequence[BlockHash], access: Access) -> None:
        """What is known of a request has changed: so may the rank of its deepest block here."""
        for name in reversed(chain):
            node = self.index.get(name)
            if node is not None:
                if node.access is access:
                    self.index.reconsider(node)
                return

    def _make_room(self, newcomer: SimulatedNode, now: float) -> bool:
        while self.used_bytes + newcomer.num_bytes > self.capacity_bytes:
            if not self.index.admits(newcomer, now):
                return False
            gone = self.index.evict(now)
            if gone is None:
                return False
            self.used_bytes -= gone.num_bytes
            self.count.evicted_blocks += 1
            if self._below is not None:
                self._below.receive(gone, now)
        return True


@dataclass(frozen=True, slots=True)
class BlockShape:
    """What all blocks of a prompt have in common."""

    num_tokens: int
    num_bytes: int

"""The radix index: which blocks of which prefixes a holder has.

A block hash is a chain, so it names the whole path to its block: a node is found by one look-up
instead of a walk along edges, and a prefix is matched by one look-up per block. The links between
nodes exist for one purpose: order. Eviction takes leaves only, so a parent never goes before its
children (they would be dead bytes), and removing a block removes what hangs below it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from policies.access import NO_ACCESS, Access
from policies.eviction import EvictionQueue
from prefix_store.base import BlockHash, StoreError

V = TypeVar("V")

NODE_BYTES = 352
"""Memory of one node with its hash and its dictionary entry (upper bound, held to by a test)."""

CANDIDATE_BYTES = 400
"""Memory of one place in the eviction queue, stale entries included."""


class OrphanError(StoreError):
    """A block was to be inserted below a parent that is not in the index."""


class Eviction(Protocol):
    """What orders an index's victims: any of policies.eviction, or a wrapper of one."""

    def queue(self) -> EvictionQueue[Any]:
        """A new, empty queue."""


class Node(Generic[V]):
    """One block. Owned by its index; others read it and may set `value`; `mark` belongs to the
    eviction policy."""

    __slots__ = (
        "_first_child",
        "_next",
        "_previous",
        "access",
        "depth",
        "hash",
        "inserted",
        "last_used",
        "leases",
        "mark",
        "num_bytes",
        "num_tokens",
        "parent",
        "value",
    )

    def __init__(
        self,
        block_hash: BlockHash,
        parent: Node[V] | None,
        value: V,
        clock: int,
        *,
        access: Access = NO_ACCESS,
        num_tokens: int = 0,
        num_bytes: int = 0,
    ) -> None:
        self.hash = block_hash
        self.parent = parent
        self.value = value
        self.access = access
        self.mark: Any = None
        self.num_tokens = num_tokens
        self.num_bytes = num_bytes
        self.depth: int = parent.depth + 1 if parent is not None else 0
        """Blocks before this one in its prompt."""
        self.leases = 0
        self.inserted = clock
        self.last_used = clock
        self._first_child: Node[V] | None = None
        self._next: Node[V] | None = None
        self._previous: Node[V] | None = None

    @property
    def is_leaf(self) -> bool:
        return self._first_child is None

    @property
    def parent_hash(self) -> BlockHash | None:
        """None: the first block of a prompt."""
        return self.parent.hash if self.parent is not None else None

    def lineage(self) -> list[Node[V]]:
        """From the first block of its prompt to this one."""
        nodes = [self]
        while (above := nodes[-1].parent) is not None:
            nodes.append(above)
        nodes.reverse()
        return nodes


class RadixIndex(Generic[V]):
    """Nodes by hash, with tail-first eviction in the order of a policy. Plain and synchronous, so
    every call is atomic on an event loop. What bounds it (bytes, slots) is its owner's to count:
    the owner calls `evict` until it is content."""

    def __init__(self, eviction: Eviction) -> None:
        self._nodes: dict[BlockHash, Node[V]] = {}
        self._queue: EvictionQueue[Node[V]] = eviction.queue()
        self._clock = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._nodes

    def get(self, block_hash: BlockHash) -> Node[V] | None:
        return self._nodes.get(block_hash)

    def nodes(self) -> Iterable[Node[V]]:
        """Every node, parents before their children."""
        return iter(self._nodes.values())

    def newest(self) -> Node[V] | None:
        """The node that came last."""
        return next(reversed(self._nodes.values()), None)

    def match(self, hashes: Sequence[BlockHash]) -> list[Node[V]]:
        """The longest run of `hashes`, from the first on, that is here. Reads only."""
        found: list[Node[V]] = []
        get = self._nodes.get
        for block_hash in hashes:
            node = get(block_hash)
            if node is None:
                break
            found.append(node)
        return found

    def touch(self, nodes: Sequence[Node[V]], access: Access = NO_ACCESS) -> None:
        """Mark a run, from the first block of its prompt on, as used now by `access`."""
        self._clock += 1
        clock = self._clock
        for node in nodes:
            node.last_used = clock
            node.access = access
        self._queue.use(nodes)
        if nodes and self._is_candidate(nodes[-1]):
            self._queue.add(nodes[-1])

    def reconsider(self, node: Node[V]) -> None:
        """What is known of a block's last use has changed: so may its rank."""
        if self._is_candidate(node) and self._nodes.get(node.hash) is node:
            self._queue.add(node)

    def insert(
        self,
        parent: BlockHash | None,
        block_hash: BlockHash,
        value: V,
        *,
        access: Access = NO_ACCESS,
        num_tokens: int = 0,
        num_bytes: int = 0,
    ) -> Node[V]:
        """Add a block below `parent` (None: first block of its prompt). A block that is here
        already is returned as it is. Raises OrphanError when the parent is missing."""
        node = self._nodes.get(block_hash)
        if node is not None:
            return node
        above = None
        if parent is not None:
            above = self._nodes.get(parent)
            if above is None:
                raise OrphanError(f"parent {parent.hex()} of block {block_hash.hex()} is not here")
        self._clock += 1
        node = Node(
            block_hash, above, value, self._clock,
            access=access, num_tokens=num_tokens, num_bytes=num_bytes,
        )  # fmt: skip
        self._nodes[block_hash] = node
        self._queue.insert(node)
        if above is not None:
            if above.is_leaf:
                self._queue.discard(above)
            first = above._first_child
            node._next = first
            if first is not None:
                first._previous = node
            above._first_child = node
        self._queue.add(node)
        return node

    def remove(self, block_hash: BlockHash) -> list[Node[V]]:
        """Take a block and everything below it out, leased or not; children first. Empty when the
        block is not here."""
        top = self._nodes.get(block_hash)
        if top is None:
            return []
        order = [top]
        for node in order:
            child = node._first_child
            while child is not None:
                order.append(child)
                child = child._next
        order.reverse()
        for node in order:
            self._unlink(node)
        return order

    def lease(self, nodes: Iterable[Node[V]]) -> None:
        """Protect blocks from eviction until `release`; leases on one block add up."""
        for node in nodes:
            node.leases += 1
            self._queue.discard(node)

    def release(self, nodes: Iterable[Node[V]]) -> None:
        """Undo one `lease` of each of `nodes`. Blocks that were removed meanwhile are skipped by
        the queue but still count down, so that their owner can tell when nobody reads them."""
        for node in nodes:
            node.leases -= 1
            if self._is_candidate(node) and self._nodes.get(node.hash) is node:
                self._queue.add(node)

    def candidate(self, now: float = 0.0) -> Node[V] | None:
        """The next victim: a leaf that nobody leases; None when there is none. It stays in the
        index and is nobody's candidate any more: the caller removes it, or leases and releases
        it."""
        return self._queue.pop(now)

    def evict(self, now: float = 0.0) -> Node[V] | None:
        """Take the next victim out."""
        node = self._queue.pop(now)
        if node is not None:
            self._unlink(node)
        return node

    def admits(self, node: Node[V], now: float = 0.0) -> bool:
        """Whether a block that is not here is worth the room of the next victim."""
        return self._queue.admits(node, now)

    @property
    def queue(self) -> EvictionQueue[Node[V]]:
        """The eviction policy's own view."""
        return self._queue

    def order_by(self, eviction: Eviction) -> None:
        """Another policy from now on. It has not seen the blocks' past uses but the last one."""
        self._queue = eviction.queue()
        for node in sorted(self._nodes.values(), key=lambda each: (each.last_used, each.depth)):
            node.mark = None
            self._queue.insert(node)
        for node in self._nodes.values():
            if self._is_candidate(node):
                self._queue.add(node)

    @property
    def memory_bytes(self) -> int:
        """What the index itself takes: an upper bound but for 16 KiB; values are not counted."""
        return len(self._nodes) * NODE_BYTES + len(self._queue) * CANDIDATE_BYTES

    def _is_candidate(self, node: Node[V]) -> bool:
        return node.is_leaf and node.leases == 0

    def _unlink(self, node: Node[V]) -> None:
        del self._nodes[node.hash]
        self._queue.remove(node)
        above = node.parent
        if above is None:
            return
        if node._previous is not None:
            node._previous._next = node._next
        else:
            above._first_child = node._next
        if node._next is not None:
            node._next._previous = node._previous
        node._next = node._previous = None
        if self._is_candidate(above):
            self._queue.add(above)

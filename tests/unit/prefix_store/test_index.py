"""The radix index: matching, order of eviction, leases, bounds."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence

import pytest

from policies.eviction import FifoEviction, LruEviction
from prefix_store.base import BlockHash
from prefix_store.hashing import digest
from prefix_store.index import Node, OrphanError, RadixIndex


def names(*texts: str) -> list[BlockHash]:
    return [digest(text) for text in texts]


def insert_chain(
    index: RadixIndex[int], hashes: Sequence[BlockHash], parent: BlockHash | None = None
) -> list[Node[int]]:
    nodes = []
    for block_hash in hashes:
        nodes.append(index.insert(parent, block_hash, 0))
        parent = block_hash
    return nodes


def evict_all(index: RadixIndex[int]) -> list[BlockHash]:
    order = []
    while (node := index.evict()) is not None:
        order.append(node.hash)
    return order


def test_match_is_the_longest_run_from_the_start() -> None:
    """A run ends at the first unknown block, whatever comes after it."""
    index = RadixIndex[int](LruEviction())
    a, b, c, x = names("a", "b", "c", "x")
    insert_chain(index, [a, b, c])
    assert [n.hash for n in index.match([a, b, x, c])] == [a, b]
    assert index.match([x, a]) == []
    assert index.match([]) == []


def test_block_below_an_unknown_parent_is_refused() -> None:
    """A child without its parent could never be matched."""
    index = RadixIndex[int](LruEviction())
    a, b = names("a", "b")
    with pytest.raises(OrphanError, match=a.hex()):
        index.insert(a, b, 0)
    assert len(index) == 0


def test_inserting_a_block_twice_returns_the_first() -> None:
    """The value and the place of the first insertion stay."""
    index = RadixIndex[int](LruEviction())
    (a,) = names("a")
    first = index.insert(None, a, 1)
    assert index.insert(None, a, 2) is first
    assert first.value == 1
    assert len(index) == 1


def test_eviction_takes_the_tail_first() -> None:
    """Children go before their parents, so what is left is always usable."""
    index = RadixIndex[int](LruEviction())
    chain = names("a", "b", "c", "d")
    insert_chain(index, chain)
    assert evict_all(index) == chain[::-1]
    assert len(index) == 0


def test_eviction_takes_the_branch_that_was_used_longest_ago() -> None:
    """Of two branches the unused one goes first, and the shared trunk last."""
    index = RadixIndex[int](LruEviction())
    trunk, left, right = names("trunk", "left", "right")
    insert_chain(index, [trunk, left])
    insert_chain(index, [right], trunk)
    index.touch(index.match([trunk, left]))
    assert evict_all(index) == [right, left, trunk]


def test_fifo_ignores_use() -> None:
    """The order of insertion decides, tails first."""
    index = RadixIndex[int](FifoEviction())
    a, b = names("a", "b")
    insert_chain(index, [a])
    insert_chain(index, [b])
    index.touch(index.match([a]))
    assert evict_all(index) == [a, b]


def test_leased_blocks_and_their_parents_stay() -> None:
    """A lease on a tail protects the chain above it, and release gives it free again."""
    index = RadixIndex[int](LruEviction())
    a, b, c = names("a", "b", "c")
    nodes = insert_chain(index, [a, b, c])
    index.lease(nodes[:2])
    assert evict_all(index) == [c]
    index.lease(nodes[:2])
    index.release(nodes[:2])
    assert evict_all(index) == []
    index.release(nodes[:2])
    assert evict_all(index) == [b, a]


def test_remove_takes_everything_below() -> None:
    """What hangs below a removed block is unreachable, so it goes too, children first."""
    index = RadixIndex[int](LruEviction())
    a, b, c, d = names("a", "b", "c", "d")
    insert_chain(index, [a, b, c])
    insert_chain(index, [d], b)
    order = [n.hash for n in index.remove(b)]
    assert sorted(order) == sorted([b, c, d])
    assert order[-1] == b
    assert index.remove(b) == []
    assert evict_all(index) == [a]


def test_release_after_removal_counts_down_and_frees_nothing() -> None:
    """A reader that held a removed block ends its lease without reviving the block."""
    index = RadixIndex[int](LruEviction())
    (a,) = names("a")
    (old,) = insert_chain(index, [a])
    index.lease([old])
    index.remove(a)
    (new,) = insert_chain(index, [a])
    index.lease([new])
    index.release([old])
    assert old.leases == 0
    assert new.leases == 1
    assert evict_all(index) == []


@pytest.mark.parametrize("shape", ["chain", "roots"])
@pytest.mark.parametrize("num_blocks", [1400, 5600])
def test_memory_is_bounded_by_what_the_index_says(num_blocks: int, shape: str) -> None:
    """`memory_bytes` is an upper bound right after the dictionaries grew, and with a queue full of
    stale entries."""
    hashes = names(*(str(i) for i in range(num_blocks)))
    tracemalloc.start()
    try:
        index = RadixIndex[int](LruEviction())
        before = tracemalloc.get_traced_memory()[0]
        parent: BlockHash | None = None
        for i in range(num_blocks):
            block_hash = BlockHash(bytes(bytearray(hashes[i])))
            index.insert(parent, block_hash, 0)
            parent = block_hash if shape == "chain" else None
        for node in index.nodes():
            index.touch([node])
        del node, block_hash, parent
        used = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert used <= index.memory_bytes + 16 * 1024


def test_touching_one_block_for_ever_takes_no_memory() -> None:
    """The eviction queue forgets stale entries."""
    index = RadixIndex[int](LruEviction())
    nodes = insert_chain(index, names("a"))
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(5000):
            index.touch(nodes)
        assert tracemalloc.get_traced_memory()[0] - before <= 32 * 1024
    finally:
        tracemalloc.stop()

"""The block cache of the simulated engine: what can be found, and in which order it goes."""

from __future__ import annotations

from engine_adapter.simulated.cache import Block, BlockCache
from prefix_store.base import BlockHash


def h(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "big"))


def filled(cache: BlockCache, numbers: list[int]) -> list[Block]:
    """The blocks of a sequence, all of them full."""
    blocks = cache.take(len(numbers))
    for block, number in zip(blocks, numbers, strict=True):
        cache.name(block, h(number))
    return blocks


def test_blocks_are_found_from_the_start_only() -> None:
    """A run ends with the first block that is not there, or where it may be no longer."""
    cache = BlockCache(8, lambda _: None)
    blocks = filled(cache, [1, 2, 3])
    assert cache.find([h(1), h(2), h(3), h(4)], 4) == blocks
    assert cache.find([h(1), h(9), h(3)], 3) == blocks[:1]
    assert cache.find([h(1), h(2), h(3)], 2) == blocks[:2]
    assert cache.find([h(2)], 0) == []


def test_free_blocks_go_in_the_order_of_their_release_tails_first() -> None:
    """The least recently used sequence first, and of each its last block first."""
    gone: list[BlockHash] = []
    cache = BlockCache(4, gone.append)
    old, new = filled(cache, [1, 2]), filled(cache, [3, 4])
    cache.release(old)
    cache.release(new)
    cache.take(4)
    assert gone == [h(2), h(1), h(4), h(3)]


def test_use_saves_a_block_and_makes_it_the_latest() -> None:
    """A block with a user is not free, and its release counts as its last use."""
    gone: list[BlockHash] = []
    cache = BlockCache(3, gone.append)
    blocks = filled(cache, [1, 2, 3])
    cache.release(blocks)
    cache.use(cache.find([h(1), h(2)], 2))
    assert cache.num_free == 1
    cache.release(blocks[:2])
    cache.take(3)
    assert gone == [h(3), h(2), h(1)]


def test_blocks_without_content_go_first() -> None:
    """They bring nothing to anybody."""
    gone: list[BlockHash] = []
    cache = BlockCache(4, gone.append)
    cache.release(filled(cache, [1, 2]))
    cache.release(cache.take(1) + filled(cache, [3]))
    assert gone == []
    cache.take(1)
    assert gone == []
    cache.take(1)
    assert gone == [h(2)]


def test_equal_blocks_are_copies_that_go_one_by_one() -> None:
    """The oldest is found, then the next; each is announced when it goes."""
    gone: list[BlockHash] = []
    cache = BlockCache(3, gone.append)
    first, second, third = (filled(cache, [7]) for _ in range(3))
    assert cache.find([h(7)], 1) == first
    assert len(cache) == 1
    cache.release(second)
    cache.take(1)
    assert gone == [h(7)]
    assert cache.find([h(7)], 1) == first
    cache.release(first)
    cache.take(1)
    assert cache.find([h(7)], 1) == third
    cache.release(third)
    cache.take(1)
    assert gone == [h(7)] * 3
    assert cache.find([h(7)], 1) == []


def test_reset_waits_until_nobody_uses_anything() -> None:
    """It forgets all, or nothing; it is not announced block by block."""
    gone: list[BlockHash] = []
    cache = BlockCache(2, gone.append)
    blocks = filled(cache, [1])
    assert not cache.reset()
    assert cache.find([h(1)], 1) == blocks
    cache.release(blocks)
    assert cache.usage == 0.0
    assert cache.reset()
    assert (cache.find([h(1)], 1), len(cache)) == ([], 0)
    cache.take(2)
    assert gone == []

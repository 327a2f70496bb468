"""Residency: which holder has which blocks."""

from __future__ import annotations

import tracemalloc

from prefix_store.base import BlockHash
from prefix_store.hashing import digest
from prefix_store.residency import Holder, Match, Medium, Residency

MIB = 1024**2
DEVICE = Holder("engine-0", Medium.DEVICE)
OTHER = Holder("engine-1", Medium.DEVICE)
MEMORY = Holder("store-0", Medium.MEMORY)


def prompt(*texts: str) -> list[BlockHash]:
    """A chain: equal beginnings give equal hashes."""
    return [digest("/".join(texts[: i + 1])) for i in range(len(texts))]


def test_match_gives_each_holders_run_from_the_start() -> None:
    """A holder's run ends at the first block it lacks, also when it has later ones."""
    residency = Residency(MIB)
    chain = prompt(*"abcdef")
    residency.see(chain[:5])
    residency.store(DEVICE, None, chain[:4])
    residency.store(OTHER, None, chain[:2])
    residency.store(MEMORY, chain[0], chain[1:5])
    assert residency.match(chain) == Match(5, {DEVICE: 4, OTHER: 2})
    residency.store(MEMORY, None, chain[:1])
    assert residency.match(chain) == Match(5, {DEVICE: 4, OTHER: 2, MEMORY: 5})
    assert residency.match(chain).available_blocks == 5
    assert residency.match(chain[:1]).by_holder == {DEVICE: 1, OTHER: 1, MEMORY: 1}


def test_a_path_can_lead_through_several_holders() -> None:
    """The start of a prompt from memory and its tail from disk: the run of a replica that reaches
    both is longer than that of either."""
    residency = Residency(MIB)
    disk = Holder("store-0", Medium.DISK)
    chain = prompt(*"abcdef")
    residency.see(chain)
    residency.store(DEVICE, None, chain[:1])
    residency.store(MEMORY, None, chain[:3])
    residency.store(disk, chain[2], chain[3:5])
    residency.store(OTHER, None, chain[:4])
    match = residency.match(chain)
    assert match.by_holder == {DEVICE: 1, MEMORY: 3, OTHER: 4}
    assert match.run_of((DEVICE, MEMORY, disk)) == 5
    assert match.run_of((DEVICE, disk)) == 1
    assert match.run_of((disk,)) == match.run_of(()) == 0
    assert match.run_of([OTHER]) == 4
    residency.store(MEMORY, chain[4], chain[5:])
    assert residency.match(chain).run_of((MEMORY, disk)) == 6
    assert residency.match([]).run_of((MEMORY,)) == 0
    assert Match(2, {DEVICE: 2, MEMORY: 1}).run_of((DEVICE, MEMORY)) == 2


def test_blocks_once_resident_are_told_apart_from_never_seen() -> None:
    """A ghost counts as seen and as nobody's, whoever had it and whatever else came after."""
    residency = Residency(MIB)
    chain = prompt(*"abc")
    assert residency.match(chain) == Match(0, {})
    residency.store(DEVICE, None, chain)
    residency.remove(DEVICE, chain[1])
    assert residency.match(chain) == Match(3, {DEVICE: 1})
    residency.clear(DEVICE)
    assert residency.match(chain) == Match(3, {})
    residency.store(OTHER, None, chain[:1])
    assert residency.match(chain) == Match(3, {OTHER: 1})
    assert residency.match([]) == Match(0, {})
    assert residency.match([]).available_blocks == 0


def test_prompts_that_were_only_asked_for_are_not_seen() -> None:
    """Equal prompts that arrive together, and prompts that an engine refused: nobody has computed
    them yet, so nothing of them was evicted."""
    residency = Residency(MIB)
    chain = prompt(*"abc")
    for _ in range(8):
        assert residency.see(chain) == Match(0, {})
    residency.store(DEVICE, None, chain[:2])
    assert residency.see(chain) == Match(2, {DEVICE: 2})
    residency.clear(DEVICE)
    known = [residency.was_resident(block) for block in (*chain, *prompt("other"))]
    assert known == [True, True, False, None]


def test_clear_touches_one_holder_only() -> None:
    """A restarted engine loses what it had; the store keeps its own."""
    residency = Residency(MIB)
    chain = prompt(*"abc")
    residency.store(DEVICE, None, chain)
    residency.store(MEMORY, None, chain)
    residency.clear(DEVICE)
    assert residency.match(chain) == Match(3, {MEMORY: 3})
    assert residency.stats().resident_blocks == {MEMORY: 3}


def test_bits_of_holders_that_left_are_used_again() -> None:
    """Engines that come and go for ever never make the masks wider, nor inherit blocks."""
    residency = Residency(MIB)
    chain = prompt(*"ab")
    residency.store(MEMORY, None, chain)
    for number in range(1000):
        holder = Holder(f"engine-{number}", Medium.DEVICE)
        residency.store(holder, None, chain[:1])
        assert residency.match(chain).by_holder == {MEMORY: 2, holder: 1}
        residency.clear(holder)
    assert residency._bits.take(DEVICE) == 4


def test_removing_what_is_unknown_is_harmless() -> None:
    """Late events about blocks that were forgotten change nothing."""
    residency = Residency(MIB)
    chain = prompt("a")
    residency.remove(DEVICE, chain[0])
    residency.store(DEVICE, None, chain)
    residency.remove(MEMORY, chain[0])
    residency.remove(DEVICE, chain[0])
    residency.remove(DEVICE, chain[0])
    assert residency.stats().resident_blocks == {DEVICE: 0}


def test_blocks_below_a_forgotten_parent_are_counted_as_unplaced() -> None:
    """They could not be matched, so they are not kept."""
    residency = Residency(MIB)
    chain = prompt(*"abc")
    residency.store(DEVICE, chain[0], chain[1:])
    assert residency.match(chain[1:]) == Match(0, {})
    assert residency.stats().unplaced == 2


def test_hashes_that_collide_stay_evictable() -> None:
    """Whoever forges a chain that runs into another one, or says a block twice, gets no memory that
    is never given back."""
    residency = Residency(MIB)
    (one, two, three), (forged, more) = prompt(*"abc"), prompt("x", "y")
    residency.store(DEVICE, None, [one, two])
    residency.store(OTHER, None, [forged, two, three])
    residency.store(DEVICE, None, [more, more])
    assert residency.stats().resident_blocks == {DEVICE: 3, OTHER: 3}
    assert residency.match([one, two, three]).by_holder == {DEVICE: 2}
    residency.see(prompt(*"z" * 10_000))
    residency.see(prompt(*"q" * 10_000))
    assert residency.stats().resident_blocks == {DEVICE: 0, OTHER: 0}
    assert residency.was_resident(forged) is residency.was_resident(more) is None


def test_capacity_holds_and_forgets_what_was_used_longest_ago() -> None:
    """Recent prompts stay whole, old ones go from the tail, and lost residency is counted."""
    residency = Residency(MIB)
    keep = prompt("keep", *"abcdef")
    residency.store(DEVICE, None, keep)
    for number in range(2000):
        residency.see(prompt(str(number), "x", "y"))
        residency.see(keep)
    stats = residency.stats()
    assert stats.memory_bytes <= stats.capacity_bytes
    assert stats.evicted > 0
    assert stats.evicted_resident == 0
    assert residency.match(keep) == Match(7, {DEVICE: 7})
    for number in range(2000, 6000):
        residency.see(prompt(str(number), "x", "y"))
    stats = residency.stats()
    assert stats.evicted_resident == 7
    assert stats.resident_blocks == {DEVICE: 0}
    assert residency.match(keep) == Match(0, {})


def test_prompt_larger_than_the_capacity_keeps_its_beginning() -> None:
    """Tails go first, so what fits is a usable prefix."""
    residency = Residency(MIB)
    chain = prompt(*"a" * 10_000)
    residency.see(chain)
    stats = residency.stats()
    assert stats.memory_bytes <= MIB
    assert 1000 < stats.nodes < 10_000
    residency = Residency(MIB)
    residency.store(DEVICE, None, chain)
    assert residency.match(chain).by_holder[DEVICE] == residency.stats().nodes > 1000


def test_memory_is_within_what_the_stats_say() -> None:
    """`memory_bytes` is an upper bound, with wide masks of their own on every block."""
    holders = [Holder(f"engine-{i}", Medium.DEVICE) for i in range(40)]
    names = [digest(str(i)) for i in range(6_000)]
    tracemalloc.start()
    try:
        residency = Residency(1024 * MIB)
        before = tracemalloc.get_traced_memory()[0]
        for number, name in enumerate(names):
            chain = [BlockHash(bytes(bytearray(name)))]
            residency.see(chain)
            residency.store(holders[number % 40], None, chain)
            residency.store(holders[39], None, chain)
        del chain
        used = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert used <= residency.stats().memory_bytes + 64 * 1024

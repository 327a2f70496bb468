"""Residency against sets of paths, fed with prompts that extend and fork."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from prefix_store.base import BlockHash
from prefix_store.hashing import digest
from prefix_store.residency import Holder, Medium, Residency

Path = tuple[int, ...]
paths = st.lists(st.integers(0, 1), min_size=1, max_size=4).map(tuple)
many_paths = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple)
holders = st.sampled_from(
    [Holder(source, medium) for source in ("s-0", "s-1") for medium in list(Medium)[:2]]
)


def chain_of(path: Path) -> list[BlockHash]:
    return [digest("r", bytes(path[: i + 1])) for i in range(len(path))]


def prefixes(path: Path) -> list[Path]:
    return [path[: i + 1] for i in range(len(path))]


class ResidencyMachine(RuleBasedStateMachine):
    """The model: paths known, paths that were resident once, and what each holder has."""

    def __init__(self) -> None:
        super().__init__()
        self.residency = Residency(1024**2)
        self.seen: set[Path] = set()
        self.once: set[Path] = set()
        self.held: dict[Holder, set[Path]] = {}

    @rule(path=paths)
    def see(self, path: Path) -> None:
        self.residency.see(chain_of(path))
        self.seen.update(prefixes(path))

    @rule(holder=holders, path=paths, start=st.integers(0, 3))
    def store(self, holder: Holder, path: Path, start: int) -> None:
        start = min(start, len(path) - 1)
        chain = chain_of(path)
        parent = chain[start - 1] if start else None
        self.residency.store(holder, parent, chain[start:])
        if start and path[:start] not in self.seen:
            return
        self.seen.update(prefixes(path)[start:])
        self.once.update(prefixes(path)[start:])
        self.held.setdefault(holder, set()).update(prefixes(path)[start:])

    @rule(holder=holders, path=paths)
    def remove(self, holder: Holder, path: Path) -> None:
        self.residency.remove(holder, chain_of(path)[-1])
        self.held.get(holder, set()).discard(path)

    @rule(holder=holders)
    def clear(self, holder: Holder) -> None:
        self.residency.clear(holder)
        self.held.pop(holder, None)

    @rule(path=paths)
    def match(self, path: Path) -> None:
        match = self.residency.match(chain_of(path))
        assert match.seen_blocks == self.run(path, self.once)
        expected = {h: self.run(path, held) for h, held in self.held.items()}
        assert match.by_holder == {h: n for h, n in expected.items() if n}
        some = list(self.held)[:2]
        together = set[Path]().union(*(self.held[holder] for holder in some))
        assert match.run_of(some) == self.run(path, together)

    def run(self, path: Path, present: set[Path]) -> int:
        length = 0
        while length < len(path) and path[: length + 1] in present:
            length += 1
        return length

    @invariant()
    def counts_agree(self) -> None:
        stats = self.residency.stats()
        assert stats.resident_blocks == {h: len(held) for h, held in self.held.items()}
        assert stats.nodes == len(self.seen)


TestResidencyMachine = ResidencyMachine.TestCase
TestResidencyMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestResidencyMachine.__doc__ = "Every call agrees with plain sets, in any order of calls."


class FullResidencyMachine(RuleBasedStateMachine):
    """An index with room for a few dozen blocks, where more are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.residency = Residency(12_000)

    @rule(path=many_paths)
    def see(self, path: Path) -> None:
        before = {block.hash for block in self.residency._blocks}
        self.residency.see(chain_of(path))
        evicted = before - {block.hash for block in self.residency._blocks}
        if evicted:  # others went first, and no more of them than had to
            assert self.residency.match(chain_of(path)).stretches[-1].end == len(path)
            stats = self.residency.stats()
            assert stats.memory_bytes > stats.capacity_bytes - 1_500

    @rule(holder=holders, path=many_paths, start=st.integers(0, 3), assumed=st.booleans())
    def store(self, holder: Holder, path: Path, start: int, assumed: bool) -> None:
        start = min(start, len(path) - 1)
        chain = chain_of(path)
        holder = replace(holder, assumed=assumed)
        kept = self.residency.store(holder, chain[start - 1] if start else None, chain[start:])
        assert kept in ([], chain[start:])

    @rule(holder=holders, path=many_paths)
    def remove(self, holder: Holder, path: Path) -> None:
        self.residency.remove(holder, chain_of(path)[-1])

    @rule(holder=holders)
    def clear(self, holder: Holder) -> None:
        self.residency.clear(holder)

    @invariant()
    def parents_stay_and_counts_agree(self) -> None:
        """Whatever was evicted: no block is without its parent, every leaf can be evicted, each
        sum is that of the blocks."""
        blocks = {block.hash: block for block in self.residency._blocks}
        children = Counter(block.parent for block in blocks.values() if block.parent is not None)
        assert children.keys() <= blocks.keys()
        assert len(self.residency._blocks) == len(blocks)
        assert all(block.children == children[block.hash] for block in blocks.values())
        assert all(block.queued for block in blocks.values() if not block.children)
        stats = self.residency.stats()
        bits = self.residency._bits
        for holder, count in stats.resident_blocks.items():
            bit = bits.find(holder)
            assert count == sum(bool(block.holders & bit) for block in blocks.values())
        assert self.residency._links == sum(stats.resident_blocks.values())
        # Masks are counted when they come up, and make room for themselves with the next block.
        assert stats.memory_bytes - self.residency._masks.memory_bytes <= stats.capacity_bytes


TestFullResidencyMachine = FullResidencyMachine.TestCase
TestFullResidencyMachine.settings = settings(
    max_examples=30, stateful_step_count=80, deadline=None, phases=[Phase.generate]
)
TestFullResidencyMachine.__doc__ = "An index that is full stays consistent, and evicts tails first."

"""The radix index against a slow, obvious model, fed with chains that extend and fork."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from policies.eviction import LruEviction
from prefix_store.base import BlockHash
from prefix_store.hashing import digest
from prefix_store.index import Node, RadixIndex

Path = tuple[int, ...]
paths = st.lists(st.integers(0, 2), min_size=1, max_size=3).map(tuple)


def chain_of(path: Path) -> list[BlockHash]:
    """Hashes of the blocks along a path; equal beginnings give equal hashes."""
    return [digest("block", bytes(path[: i + 1])) for i in range(len(path))]


class IndexMachine(RuleBasedStateMachine):
    """The model keeps the set of paths that are present, when each was used, and its leases."""

    def __init__(self) -> None:
        super().__init__()
        self.index = RadixIndex[Path](LruEviction())
        self.used: dict[Path, int] = {}
        self.leased: Counter[Path] = Counter()
        self.held: list[list[Node[Path]]] = []
        self.clock = 0

    def prefixes(self, path: Path) -> list[Path]:
        return [path[: i + 1] for i in range(len(path))]

    def present(self, path: Path) -> list[Path]:
        run = []
        for prefix in self.prefixes(path):
            if prefix not in self.used:
                break
            run.append(prefix)
        return run

    @rule(path=paths)
    def insert(self, path: Path) -> None:
        parent = None
        for prefix, block_hash in zip(self.prefixes(path), chain_of(path), strict=True):
            if prefix not in self.used:
                self.clock += 1
                self.used[prefix] = self.clock
            self.index.insert(parent, block_hash, prefix)
            parent = block_hash

    @rule(path=paths)
    def touch(self, path: Path) -> None:
        self.index.touch(self.index.match(chain_of(path)))
        self.clock += 1
        for prefix in self.present(path):
            self.used[prefix] = self.clock

    @rule(path=paths)
    def match(self, path: Path) -> None:
        found = [n.value for n in self.index.match(chain_of(path))]
        assert found == self.present(path)

    @rule(path=paths)
    def lease(self, path: Path) -> None:
        nodes = self.index.match(chain_of(path))
        self.index.lease(nodes)
        self.held.append(nodes)
        self.leased.update(n.value for n in nodes)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        nodes = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.index.release(nodes)
        for node in nodes:
            if self.index.get(node.hash) is node:
                self.leased[node.value] -= 1

    @rule(path=paths)
    def remove(self, path: Path) -> None:
        gone = [n.value for n in self.index.remove(chain_of(path)[-1])]
        expected = {p for p in self.used if p[: len(path)] == path}
        assert set(gone) == expected
        assert len(gone) == len(expected)
        for position, victim in enumerate(gone):
            assert not any(p[: len(victim)] == victim for p in gone[position + 1 :])
        for victim in gone:
            del self.used[victim]
            del self.leased[victim]

    @rule(count=st.integers(1, 4))
    def evict(self, count: int) -> None:
        for _ in range(count):
            self.evict_one()

    def evict_one(self) -> None:
        candidates = [
            path
            for path in self.used
            if not self.leased[path] and not any(p[:-1] == path for p in self.used)
        ]
        node = self.index.evict()
        if not candidates:
            assert node is None
            return
        assert node is not None
        assert node.value in candidates
        assert self.used[node.value] == min(self.used[path] for path in candidates)
        del self.used[node.value]

    @invariant()
    def same_blocks(self) -> None:
        assert {n.value for n in self.index.nodes()} == set(self.used)
        assert len(self.index) == len(self.used)

    @invariant()
    def depth_is_the_place_in_the_prompt(self) -> None:
        for node in self.index.nodes():
            assert node.depth == len(node.value) - 1
            assert node.is_leaf == (not any(p[:-1] == node.value for p in self.used))


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestIndexMachine.__doc__ = "Every call agrees with the model, in any order of calls."

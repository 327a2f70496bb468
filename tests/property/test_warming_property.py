"""Prompts that are being computed, against a plain list of who computes what."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from gateway.fleet.warming import Warming, WarmingPrefixes
from prefix_store.base import BlockHash

CHAINS = st.text("ab", min_size=1, max_size=9)
"""Few letters: prompts share prefixes and extend one another."""
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), CHAINS, st.integers(0, 5)),
        st.tuples(st.just("begin"), CHAINS, st.integers(0, 5)),
        st.tuples(st.sampled_from(["done", "failed_or_done"]), st.integers(0, 50)),
    ),
    min_size=5,
    max_size=40,
)


def chain(text: str) -> list[BlockHash]:
    return [BlockHash(text[: end + 1].encode()) for end in range(len(text))]


@dataclass(eq=False)
class Computing:
    warming: Warming
    num_missing: int
    owned: set[BlockHash]


@dataclass
class Model:
    """Oldest first; a block is owned by the first who began with it."""

    max_hashes: int
    computing: list[Computing] = field(default_factory=list)

    def make_room(self, num_missing: int) -> None:
        while sum(e.num_missing for e in self.computing) + num_missing > self.max_hashes:
            self.computing.pop(0)

    def begin(self, warming: Warming, missing: list[BlockHash]) -> None:
        missing = missing[: self.max_hashes]
        self.make_room(len(missing))
        owned = set().union(*(each.owned for each in self.computing))
        self.computing.append(Computing(warming, len(missing), set(missing) - owned))

    def find(self, hashes: list[BlockHash], held_blocks: int) -> Warming | None:
        for block_hash in reversed(hashes[held_blocks:]):
            for each in self.computing:
                if block_hash in each.owned:
                    return each.warming
        return None


@given(STEPS, st.sampled_from([4, 20, 1000]), CHAINS)
def test_it_finds_whom_a_search_through_all_would_find(steps, max_hashes, asked):
    """Whatever began, ended or was forgotten before. And who is found really computes the
    block, or needed it."""
    prefixes, model = WarmingPrefixes(max_hashes), Model(max_hashes)
    begun: list[Warming] = []
    for step in steps:
        match step:
            case ("begin", text, first_missing):
                begun.append(prefixes.begin(chain(text), first_missing, "engine-0"))
                model.begin(begun[-1], chain(text)[first_missing:])
            case (end, number) if begun:
                ends = begun[number % len(begun)]
                getattr(ends, end)()
                model.computing = [each for each in model.computing if each.warming is not ends]
        assert len(prefixes) == sum(len(each.owned) for each in model.computing)
        assert len(prefixes) <= max_hashes
        for held_blocks in range(len(asked) + 1):
            found = prefixes.find(chain(asked), held_blocks)
            assert found is model.find(chain(asked), held_blocks)
            if found is not None:
                assert found.blocks_of(chain(asked)) > held_blocks
    for each in begun:
        each.failed_or_done()
    assert len(prefixes) == 0

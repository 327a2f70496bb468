"""Candidates in groups of equal worth, against a list that is searched anew each time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from policies.access import NO_ACCESS, Access
from policies.eviction.cells import Cells
from policies.eviction.gap_model import Curve


@dataclass(eq=False)
class Leaf:
    """A block in the cells."""

    last_used: int
    depth: int
    hash: bytes = b""
    num_tokens: int = 1
    num_bytes: int = 1
    inserted: int = 0
    access: Access = field(default_factory=lambda: NO_ACCESS)
    mark: Any = None


def worth_of(place: tuple[Curve, int]) -> float:
    return place[0].worth[place[1]]


@settings(max_examples=150)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["put", "put", "drop", "pop", "least", "reorder"]),
            st.integers(0, 20), st.integers(0, 2), st.integers(0, 3),
        ),
        max_size=300,
    )
)  # fmt: skip
def test_the_least_worth_goes_first_then_the_oldest_then_the_deepest(
    steps: list[tuple[str, int, int, int]],
) -> None:
    """Whatever is put, moved, dropped or made worth something else before."""
    cells, model = Cells[Leaf](), dict[Leaf, tuple[Curve, int]]()
    curves = [Curve(None) for _ in range(3)]
    for number, curve in enumerate(curves):
        curve.worth = [0.9 + 0.001 * number, 0.5 + 0.001 * number, 0.7, 0.3 + 0.001 * number]
    leaves = [Leaf(last_used=n // 3, depth=n) for n in range(21)]
    for clock, (step, number, of, bucket) in enumerate(steps):
        leaf = leaves[number]
        if step == "put":
            cells.put(leaf, curves[of], bucket)
            model[leaf] = (curves[of], bucket)
        elif step == "drop":
            assert cells.drop(leaf) == (model.pop(leaf, None) is not None)
        elif step == "reorder":
            for curve in curves:
                curve.worth = [each * (clock % 7 + 1) % 1.0 for each in curve.worth]
            cells.reorder()
        else:
            least = min((worth_of(place) for place in model.values()), default=None)
            assert cells.least() == least
            if step == "pop":
                victim = cells.pop()
                assert (victim is None) == (not model)
                if victim is not None:
                    place = model.pop(victim)
                    assert worth_of(place) == least
                    same = [each for each, where in model.items() if where == place]
                    assert all(
                        (victim.last_used, -victim.depth) < (each.last_used, -each.depth)
                        for each in same
                    )
        assert len(cells) == len(model)
        assert all(each in cells for each in model)

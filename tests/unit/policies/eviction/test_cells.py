"""Candidates in groups of equal worth, against a list that is searched anew each time."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

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


STEPS = ["put", "put", "put", "drop", "pop", "least", "reorder"]


@pytest.mark.parametrize("seed", range(12))
def test_the_least_worth_goes_first_then_the_oldest_then_the_deepest(seed: int) -> None:
    """Whatever is put, moved, dropped or made worth something else before."""
    rng = random.Random(seed)
    cells, model = Cells[Leaf](), dict[Leaf, tuple[Curve, int]]()
    curves = [Curve(None) for _ in range(2)]
    for number, curve in enumerate(curves):
        curve.worth = [0.9 + 0.001 * number, 0.5 + 0.001 * number]
    leaves = [Leaf(last_used=n // 3, depth=n) for n in range(9)]
    for clock in range(1500):
        step, of, bucket = rng.choice(STEPS), rng.randrange(2), rng.randrange(2)
        leaf = leaves[rng.randrange(9)]
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


def test_a_block_that_is_moved_often_is_kept_once() -> None:
    """Its old places go away."""
    cells, curve = Cells[Leaf](), Curve(None)
    leaf = Leaf(last_used=1, depth=0)
    for number in range(5000):
        cells.put(leaf, curve, number % 7)
    assert sum(len(entries) for entries in cells._entries.values()) < 100
    assert cells.pop() is leaf

"""The order in which replicas are asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import pytest

from gateway.fleet.choice import Replica, ranked
from prefix_store.residency import Holder, Match, Medium


@dataclass
class FixedClient:
    in_flight: int = 0
    unreachable: bool = False


def replica(name: str, **state: Any) -> Replica:
    client = cast(Any, FixedClient(**state))
    return Replica(name, client, (Holder(name, Medium.DEVICE), Holder("s", Medium.MEMORY)))


def match(**blocks: int) -> Match:
    return Match(9, {Holder(name, Medium.DEVICE): count for name, count in blocks.items()})


@pytest.mark.parametrize(
    ("replicas", "found", "order"),
    [
        ([replica("a"), replica("b")], match(b=2), "ba"),
        ([replica("a", in_flight=3), replica("b", in_flight=1)], match(a=2, b=1), "ab"),
        ([replica("a", in_flight=3), replica("b", in_flight=1)], match(a=2, b=2), "ba"),
        ([replica("a", in_flight=3), replica("b", in_flight=1)], None, "ba"),
        ([replica("a"), replica("b")], None, "ab"),
        ([replica("a", unreachable=True), replica("b", in_flight=9)], match(a=5), "ba"),
        ([replica("a", unreachable=True)], match(a=5), "a"),
    ],
)
def test_order(replicas, found, order):
    """Reachable first, then the most blocks, then the fewest running requests."""
    assert "".join(choice.replica.id for choice in ranked(replicas, found)) == order


def test_every_tier_of_a_store_is_on_the_path():
    """Each is closed under prefixes by itself, so the longest run of them counts."""
    client = cast(Any, FixedClient())
    tiers = (Medium.MEMORY, Medium.DISK, Medium.REDIS)
    path = Replica("a", client, tuple(Holder("s", tier) for tier in tiers))
    found = {Holder("s", tier): blocks for tier, blocks in zip(tiers, (2, 7, 5), strict=True)}
    (choice,) = ranked([path], Match(9, found))
    assert choice.captured_blocks == 7


def test_blocks_on_the_path_are_counted():
    """The longest run of any holder there."""
    (choice,) = ranked([replica("a")], Match(9, {Holder("s", Medium.MEMORY): 4}))
    assert choice.captured_blocks == 4

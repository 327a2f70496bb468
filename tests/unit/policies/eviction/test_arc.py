"""Adaptive replacement cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from policies.eviction import ArcEviction


def test_a_scan_does_not_push_out_what_was_used_twice(tier_of: Callable[[Any], Any]) -> None:
    """Blocks used once go, however new."""
    tier = tier_of(ArcEviction())
    tier.insert("ab")
    tier.use("ab")
    tier.insert("xyz")
    assert tier.evict(4) == "xyza"


def test_what_comes_back_soon_after_it_left_makes_room_for_newcomers(
    tier_of: Callable[[Any], Any],
) -> None:
    """A ghost of T1 raises T1's target, so T2 gives way."""
    tier = tier_of(ArcEviction())
    tier.insert("abcd")
    tier.use("abcd")
    tier.insert("xyz")
    assert tier.evict(2) == "xy"
    tier.insert("xy")  # ghosts: the target is 2 now, and they are in T2
    tier.insert("w")
    assert tier.evict(2) == "ab"


def test_what_comes_back_to_the_frequent_takes_room_from_newcomers(
    tier_of: Callable[[Any], Any],
) -> None:
    """A ghost of T2 lowers T1's target again."""
    tier = tier_of(ArcEviction())
    tier.insert("abcd")
    tier.use("abcd")
    tier.insert("xyz")
    assert tier.evict(2) == "xy"
    tier.insert("xyw")
    assert tier.evict() == "a"
    tier.insert("a")  # the target is 1 again, and T1 holds z and w
    assert tier.evict() == "z"


def test_many_ghosts_on_the_other_side_make_a_larger_step(tier_of: Callable[[Any], Any]) -> None:
    """The step is the ratio of the ghosts: one of two of T2 against one of T1."""
    tier = tier_of(ArcEviction())
    tier.insert("abcdefgh")
    tier.use("abcdefgh")
    assert tier.evict(2) == "ab"  # T2's ghosts
    tier.insert("x")
    assert tier.evict() == "x"  # T1's ghost
    tier.insert("x")  # a step of 2 / 1
    tier.insert("vw")
    assert tier.evict(2) == "cd"  # T1 is not above its target of 2
    tier.insert("u")
    assert tier.evict() == "v"


def test_ghosts_are_no_more_than_the_blocks(tier_of: Callable[[Any], Any]) -> None:
    """What is remembered is bounded by what is here."""
    tier = tier_of(ArcEviction())
    tier.insert("abcdef")
    tier.use("abcd")
    for round_ in range(20):
        tier.insert(chr(ord("A") + round_))
        tier.evict()
        ghosts = len(tier.queue._b1) + len(tier.queue._b2)
        assert 0 < ghosts <= len(tier.blocks)
    tier.evict(len(tier.blocks))
    assert len(tier.queue._b1) + len(tier.queue._b2) == 0

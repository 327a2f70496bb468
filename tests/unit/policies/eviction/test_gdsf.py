"""Greedy-Dual-Size-Frequency."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from policies.eviction import GdsfEviction


def test_what_is_cheaper_to_compute_goes_first(tier_of: Callable[[Any], Any]) -> None:
    """Late tokens attend to more, so they cost more."""
    tier = tier_of(GdsfEviction(attention_tokens=64))
    tier.insert("d", depth=9)
    tier.insert("s", depth=1)
    assert tier.evict(2) == "sd"


def test_what_takes_more_bytes_goes_first(tier_of: Callable[[Any], Any]) -> None:
    """The same cost in twice the room is worth half."""
    tier = tier_of(GdsfEviction())
    tier.insert("s", num_bytes=64)
    tier.insert("l", num_bytes=128)
    assert tier.evict(2) == "ls"


def test_uses_multiply_the_cost(tier_of: Callable[[Any], Any]) -> None:
    """A cheap block that is used often outlives a dear one, until that is used as well."""
    tier = tier_of(GdsfEviction(attention_tokens=64))
    tier.insert("d", depth=2)  # costs twice as much as
    tier.insert("s", depth=0)
    tier.use("ss")
    assert tier.evict() == "d"


def test_with_twice_the_attention_tokens_before_it_a_block_is_worth_three(
    tier_of: Callable[[Any], Any],
) -> None:
    """The knob means what it says: 1 + 128 / 64."""
    tier = tier_of(GdsfEviction(attention_tokens=64))
    tier.insert("d", depth=4)
    tier.insert("t", depth=0)
    tier.insert("f", depth=0)
    tier.use("tt")
    tier.use("fff")
    assert tier.evict(3) == "dtf"  # 3, 3 and 4; of equals the one that was used longest ago

"""LFU with dynamic aging."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from policies.eviction import LfuDaEviction


def test_what_is_used_less_often_goes_first(tier_of: Callable[[Any], Any]) -> None:
    """Frequency decides, recency only among equals."""
    tier = tier_of(LfuDaEviction())
    tier.insert("abc")
    tier.use("aacb")
    assert tier.evict(3) == "cba"


def test_what_was_popular_once_ages(tier_of: Callable[[Any], Any]) -> None:
    """Ten old uses do not outlive newcomers for ever: each victim makes the queue older."""
    tier = tier_of(LfuDaEviction())
    tier.insert("a")
    tier.use("a" * 9)
    victims = ""
    for _ in range(10):
        tier.insert("x")
        victims += tier.evict()
    assert victims == "x" * 9 + "a"

"""Three FIFO queues."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from policies.eviction import S3FifoEviction


def test_newcomers_that_are_not_used_twice_go_first(tier_of: Callable[[Any], Any]) -> None:
    """Two uses bring a block to the main line; one does not."""
    tier = tier_of(S3FifoEviction())
    tier.insert("abcd")
    tier.use("aab")
    assert tier.evict(4) == "bcda"


def test_a_newcomer_that_comes_back_joins_the_main_line(tier_of: Callable[[Any], Any]) -> None:
    """The ghosts remember whom the small line let go."""
    tier = tier_of(S3FifoEviction())
    tier.insert("abcd")
    assert tier.evict() == "a"
    tier.insert("a")
    assert tier.evict(4) == "bcda"


def test_the_main_line_goes_when_newcomers_have_less_than_their_share(
    tier_of: Callable[[Any], Any],
) -> None:
    """One newcomer of four blocks is less than half."""
    tier = tier_of(S3FifoEviction(small=0.5))
    tier.insert("abcd")
    tier.use("aabbcc")
    assert tier.evict() == "d"  # on the way the others join the main line
    tier.insert("n")
    assert tier.evict(3) == "abn"


def test_at_most_three_uses_count(tier_of: Callable[[Any], Any]) -> None:
    """Four uses are worth no more than three, so the order of the line decides."""
    tier = tier_of(S3FifoEviction())
    tier.insert("abz")
    tier.use("aabb")
    assert tier.evict() == "z"
    tier.use("aaaabbb")
    assert tier.evict(2) == "ab"


def test_each_use_gives_another_round(tier_of: Callable[[Any], Any]) -> None:
    """Two uses outlive one, whatever the order of the line."""
    tier = tier_of(S3FifoEviction())
    tier.insert("abz")
    tier.use("aabb")
    assert tier.evict() == "z"
    tier.use("aab")
    assert tier.evict(2) == "ba"

"""The account against LRU, and LRU's hits without an LRU cache."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from policies.eviction.lru_guard import GRACE_PROMPTS, LESSONS, TOLERANCE, TRIAL_PROMPTS, LruGuard


@dataclass(eq=False)
class Tail:
    """A run of blocks."""

    stacked: int = 0
    listed: bool = False
    tokens: int = 0


@settings(max_examples=200)
@given(st.integers(1, 12), st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6)), max_size=60))
def test_the_stack_knows_what_lru_would_have_found(
    capacity: int, requests: list[tuple[int, int]]
) -> None:
    """Prompts of one chain each, of changing length, next to a tail-first LRU cache of blocks."""
    guard = LruGuard()
    guard.capacity = capacity
    cache: dict[tuple[int, int], int] = {}
    """When each block was used last."""
    runs: dict[tuple[int, int], Tail] = {}
    for clock, (chain, length) in enumerate(requests):
        blocks = [(chain, depth) for depth in range(length)]
        expected = 0
        while expected < length and blocks[expected] in cache:
            expected += 1
        new, found = Tail(), 0
        for block in blocks:
            old = runs.get(block)
            if old is not None:
                old.tokens -= 1
                found += guard.shrank(old, 1)
            new.tokens += 1
            runs[block] = new
        guard.grew(new, length)
        assert found == expected
        cache.update(dict.fromkeys(blocks, clock))
        while len(cache) > capacity:
            del cache[min(cache, key=lambda block: (cache[block], -block[1]))]


def learned(capacity: int = 1000, prompt: int = 10) -> LruGuard:
    """A guard after its lessons."""
    guard = LruGuard()
    guard.capacity = capacity
    guard.prompt(prompt)
    guard.requested(int(LESSONS * capacity))
    return guard


def test_lru_rules_while_the_predictions_are_learned() -> None:
    """A tier that has just become full has seen little of what it is about."""
    guard = LruGuard()
    guard.capacity = 1000
    guard.requested(10)
    assert guard.lru_rules
    assert not learned().lru_rules


def test_a_tier_that_was_never_full_needs_no_rule() -> None:
    """Nothing is evicted, so nobody can be wrong."""
    guard = LruGuard()
    guard.requested(10**9)
    assert not guard.lru_rules


def test_lru_rules_when_the_account_is_overdrawn() -> None:
    """Losses up to the grace are borne, more are not."""
    guard = learned()
    guard.settle(ours=0, lru=int(GRACE_PROMPTS * 10))
    guard.requested(1)
    assert not guard.lru_rules
    guard.settle(ours=0, lru=1 + int(0.01 * LESSONS * 1000))
    guard.requested(1)
    assert guard.lru_rules


def test_earlier_gains_do_not_pay_for_losses() -> None:
    """The account is never above zero."""
    guard = learned()
    guard.settle(ours=10**6, lru=0)
    guard.settle(ours=0, lru=int(GRACE_PROMPTS * 10 + 0.01 * LESSONS * 1000))
    guard.requested(1)
    assert guard.lru_rules


def test_the_predictions_are_tried_again_when_there_is_room_for_a_loss() -> None:
    """Requested tokens make room, so LRU does not rule for ever."""
    guard = learned()
    guard.settle(ours=0, lru=200)
    guard.requested(1)
    assert guard.lru_rules
    ruled = 0
    while guard.lru_rules:
        guard.requested(100)
        ruled += 100
    # The account was -200: it may be tried from 4 prompts (40 tokens) and the tolerance on.
    room = (GRACE_PROMPTS - TRIAL_PROMPTS) * 10 + TOLERANCE * (ruled + LESSONS * 1000)
    assert 200 * 0.7 < room < 200 * 1.1


def test_losing_all_the_time_costs_little_in_the_long_run() -> None:
    """Predictions that are always wrong, and a million requested tokens."""
    guard = learned()
    lost = 0
    for _ in range(100_000):
        if not guard.lru_rules:
            guard.settle(ours=0, lru=10)
            lost += 10
        guard.requested(10)
    assert lost < 0.005 * 1_000_000


def test_memory_stays_small_when_runs_come_and_go() -> None:
    """Runs of which nothing is left are dropped from the list."""
    guard = LruGuard()
    guard.capacity = 10**9
    keep = Tail()
    guard.grew(keep, 5)
    for _ in range(5000):
        tail = Tail()
        guard.grew(tail, 5)
        guard.shrank(tail, 5)
    assert len(guard._stack) < 200
    assert guard.shrank(keep, 5) == 5

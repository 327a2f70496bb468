"""Equal cold prompts: who is found computing them, and what becomes of those who wait."""

from __future__ import annotations

import asyncio

import pytest

from gateway.fleet.warming import WarmingPrefixes
from prefix_store.base import BlockHash


def chain(text: str) -> list[BlockHash]:
    """One block a letter; each hash stands for all letters up to its own."""
    return [BlockHash(text[: end + 1].encode()) for end in range(len(text))]


async def turn() -> None:
    """Let everything that can run, run."""
    for _ in range(5):
        await asyncio.sleep(0)


def test_the_longest_common_part_is_found():
    """Of two that compute parts of a prompt, the one that computes more of it."""
    prefixes = WarmingPrefixes()
    short = prefixes.begin(chain("abc"), 0, "engine-0")
    long = prefixes.begin(chain("abcdef"), 0, "engine-1")
    assert prefixes.find(chain("abcdexyz"), 0) is long
    assert long.blocks_of(chain("abcdexyz")) == 5
    assert prefixes.find(chain("abxyz"), 0) is short
    assert short.blocks_of(chain("abxyz")) == 2
    assert prefixes.find(chain("xyz"), 0) is None


def test_only_what_is_more_than_anybody_holds_is_found():
    """Waiting for less would bring nothing."""
    prefixes = WarmingPrefixes()
    warming = prefixes.begin(chain("abcd"), 0, "engine-0")
    assert prefixes.find(chain("abcdef"), 3) is warming
    assert prefixes.find(chain("abcdef"), 4) is None


def test_what_the_replica_has_already_is_not_being_computed():
    """It can be had without waiting."""
    prefixes = WarmingPrefixes()
    prefixes.begin(chain("abcd"), 2, "engine-0")
    assert prefixes.find(chain("abxyz"), 0) is None
    assert prefixes.find(chain("abcxyz"), 0) is not None


def test_nobody_is_found_once_it_is_there():
    """Nor when it failed."""
    prefixes = WarmingPrefixes()
    for end in ("done", "failed_or_done"):
        getattr(prefixes.begin(chain("abcd"), 0, "engine-0"), end)()
        assert prefixes.find(chain("abcd"), 0) is None
        assert len(prefixes) == 0


def test_a_prompt_without_missing_blocks_leaves_no_trace():
    """There is nothing to wait for."""
    prefixes = WarmingPrefixes()
    warming = prefixes.begin(chain("abcd"), 4, "engine-0")
    assert prefixes.find(chain("abcd"), 0) is None
    warming.done()
    assert len(prefixes) == 0


def test_the_end_is_told_once():
    """What was done does not fail any more when its request ends."""
    prefixes = WarmingPrefixes()
    warming = prefixes.begin(chain("abcd"), 0, "engine-0")
    warming.done()
    other = prefixes.begin(chain("abcd"), 0, "engine-1")
    warming.failed_or_done()
    assert not warming.failed
    assert prefixes.find(chain("abcd"), 0) is other


@pytest.mark.parametrize("max_hashes", [6, 7])
def test_the_oldest_are_forgotten_when_there_are_too_many(max_hashes):
    """And may end later without harm."""
    prefixes = WarmingPrefixes(max_hashes)
    old = prefixes.begin(chain("abc"), 0, "engine-0")
    middle = prefixes.begin(chain("def"), 0, "engine-0")
    prefixes.begin(chain("uvwx"), 0, "engine-0")
    assert prefixes.find(chain("abc"), 0) is None
    assert prefixes.find(chain("def"), 0) is (middle if max_hashes == 7 else None)
    assert prefixes.find(chain("uvwx"), 0) is not None
    old.done()
    assert len(prefixes) <= max_hashes


def test_a_prompt_longer_than_the_bound_is_found_by_its_start():
    """The bound holds for one prompt as well."""
    prefixes = WarmingPrefixes(4)
    prefixes.begin(chain("ab"), 0, "engine-0")
    warming = prefixes.begin(chain("uvwxyz"), 1, "engine-0")
    assert len(prefixes) == 4
    assert prefixes.find(chain("uvwxyz"), 4) is warming
    assert prefixes.find(chain("uvwxyz"), 5) is None
    warming.done()
    assert len(prefixes) == 0


async def test_all_who_wait_go_on_when_it_is_there():
    """And know that it is."""
    prefixes = WarmingPrefixes()
    warming = prefixes.begin(chain("abcd"), 0, "engine-0")
    waits = [asyncio.create_task(warming.wait(60.0)) for _ in range(3)]
    await turn()
    assert not any(wait.done() for wait in waits)
    warming.done()
    assert await asyncio.gather(*waits) == [True, True, True]
    assert await warming.wait(60.0)


async def test_waiting_has_an_end():
    """The leader may take long; it goes on all the same."""
    warming = WarmingPrefixes().begin(chain("abcd"), 0, "engine-0")
    assert not await warming.wait(0.0)
    assert not await warming.wait(0.001)
    assert not warming.failed
    warming.done()
    assert await warming.wait(0.0)


async def test_one_of_those_who_waited_for_a_leader_that_failed_is_the_next():
    """The others wait for that one then: still only one computes."""
    prefixes = WarmingPrefixes()
    begun = []

    async def follow(name: str) -> None:
        while (leader := prefixes.find(chain("abcd"), 0)) is not None:
            if await leader.wait(60.0):
                return
            assert leader.failed
        begun.append((name, prefixes.begin(chain("abcd"), 0, name)))

    first = prefixes.begin(chain("abcd"), 0, "engine-0")
    follows = [asyncio.create_task(follow(name)) for name in ("one", "two", "three")]
    await turn()
    first.failed_or_done()
    await turn()
    assert [name for name, _ in begun] == ["one"]
    begun[0][1].done()
    await asyncio.gather(*follows)
    assert len(begun) == 1


async def test_who_is_cancelled_while_waiting_leaves_the_others_alone():
    """A client that hung up."""
    warming = WarmingPrefixes().begin(chain("abcd"), 0, "engine-0")
    gone, stays = (asyncio.create_task(warming.wait(60.0)) for _ in range(2))
    await turn()
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    warming.done()
    assert await stays

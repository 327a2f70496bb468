"""One suite for every eviction policy: what a tier may rely on, whatever the kind."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from policies.eviction import Eviction, EvictionQueue

KINDS = ["lru", "fifo"]


def new_queue(kind: str) -> EvictionQueue[bytes]:
    policy: Any = TypeAdapter(Eviction).validate_python({"kind": kind})
    queue: EvictionQueue[bytes] = policy.queue()
    return queue


@pytest.mark.parametrize("kind", KINDS)
@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "discard", "pop"]), st.integers(0, 12)), max_size=200
    )
)
def test_a_queue_holds_exactly_its_candidates(kind: str, steps: list[tuple[str, int]]) -> None:
    """Whatever is added comes out once, unless it was discarded; nothing else does."""
    queue, model = new_queue(kind), set[bytes]()
    for clock, (step, number) in enumerate(steps):
        key = bytes([number])
        if step == "add":
            queue.add(key, inserted=clock, last_used=clock, depth=number)
            model.add(key)
        elif step == "discard":
            queue.discard(key)
            model.discard(key)
        else:
            victim = queue.pop()
            assert (victim is None) == (not model)
            if victim is not None:
                assert victim in model
                model.remove(victim)
        assert len(queue) == len(model)


@pytest.mark.parametrize("kind", KINDS)
def test_among_equals_the_deepest_block_goes_first(kind: str) -> None:
    """Tails go before heads when nothing else tells blocks apart."""
    queue = new_queue(kind)
    for depth in (3, 9, 1):
        queue.add(bytes([depth]), inserted=5, last_used=5, depth=depth)
    assert [queue.pop(), queue.pop(), queue.pop()] == [b"\x09", b"\x03", b"\x01"]


def test_lru_takes_what_was_used_longest_ago() -> None:
    """A later use moves a block back in the order."""
    queue = new_queue("lru")
    queue.add(b"a", inserted=1, last_used=1, depth=0)
    queue.add(b"b", inserted=2, last_used=2, depth=0)
    queue.add(b"a", inserted=1, last_used=3, depth=0)
    assert [queue.pop(), queue.pop(), queue.pop()] == [b"b", b"a", None]


def test_fifo_ignores_use() -> None:
    """First in, first out."""
    queue = new_queue("fifo")
    queue.add(b"a", inserted=1, last_used=9, depth=0)
    queue.add(b"b", inserted=2, last_used=2, depth=0)
    assert queue.pop() == b"a"

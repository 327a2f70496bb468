"""One suite for every eviction policy: what a tier may rely on, whatever the kind."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from policies.access import NO_ACCESS, Access
from policies.eviction import Eviction, EvictionQueue

KINDS = ["lru", "fifo", "lfu_da", "gdsf", "arc", "s3_fifo", "reuse_aware"]
TAILS_COST_MORE = {"gdsf"}
"""To these kinds depth is a difference, so that nothing is equal."""


@dataclass(eq=False)
class Entry:
    """A block as policies see it."""

    hash: bytes = b""
    depth: int = 0
    num_tokens: int = 32
    num_bytes: int = 1024
    inserted: int = 0
    last_used: int = 0
    access: Access = field(default_factory=lambda: NO_ACCESS)
    mark: Any = None


def new_queue(kind: str) -> EvictionQueue[Entry]:
    policy: Any = TypeAdapter(Eviction).validate_python({"kind": kind})
    queue: EvictionQueue[Entry] = policy.queue()
    return queue


@pytest.mark.parametrize("kind", KINDS)
@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "use", "discard", "pop"]), st.integers(0, 12)),
        max_size=200,
    )
)
def test_a_queue_holds_exactly_its_candidates(kind: str, steps: list[tuple[str, int]]) -> None:
    """Whatever is added comes out once, unless it was discarded; nothing else does."""
    queue, model = new_queue(kind), set[int]()
    entries: dict[int, Entry] = {}
    for clock, (step, number) in enumerate(steps):
        entry = entries.get(number)
        if step == "add" and entry is None:
            entry = Entry(bytes([number]), number, inserted=clock, last_used=clock)
            entries[number] = entry
            queue.insert(entry)
            queue.add(entry)
            model.add(number)
        elif step in ("use", "add") and entry is not None:
            entry.last_used = clock
            entry.access = Access(time_s=float(clock))
            queue.use([entry])
            if number in model or step == "add":
                queue.add(entry)
                model.add(number)
        elif step == "discard" and entry is not None:
            queue.discard(entry)
            model.discard(number)
        elif step == "pop":
            victim = queue.pop(float(clock))
            assert (victim is None) == (not model)
            if victim is not None:
                assert entries.pop(victim.depth) is victim
                model.remove(victim.depth)
                queue.remove(victim)
        assert len(queue) == len(model)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in TAILS_COST_MORE])
def test_among_equals_the_deepest_block_goes_first(kind: str) -> None:
    """Tails go before heads when nothing else tells blocks apart."""
    queue = new_queue(kind)
    for depth in (3, 9, 1):
        entry = Entry(bytes([depth]), depth, inserted=5, last_used=5)
        queue.insert(entry)
        queue.add(entry)
    order = [queue.pop(0.0), queue.pop(0.0), queue.pop(0.0)]
    assert [entry.depth for entry in order if entry is not None] == [9, 3, 1]


def test_lru_takes_what_was_used_longest_ago() -> None:
    """A later use moves a block back in the order."""
    queue = new_queue("lru")
    a, b = Entry(b"a", last_used=1), Entry(b"b", last_used=2)
    queue.add(a)
    queue.add(b)
    a.last_used = 3
    queue.add(a)
    assert [queue.pop(0.0), queue.pop(0.0), queue.pop(0.0)] == [b, a, None]


def test_fifo_ignores_use() -> None:
    """First in, first out."""
    queue = new_queue("fifo")
    a, b = Entry(b"a", inserted=1, last_used=9), Entry(b"b", inserted=2, last_used=2)
    queue.add(a)
    queue.add(b)
    assert queue.pop(0.0) is a

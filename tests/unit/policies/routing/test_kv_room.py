"""Free KV memory between two looks at the gauge."""

from __future__ import annotations

import pytest

from policies.routing.engine_load import EngineLoad
from policies.routing.kv_room import KvRoom


def load(kv_free: float | None, kv_tokens: int | None = None) -> EngineLoad:
    return EngineLoad(1, 0, kv_free, kv_tokens)


def test_before_the_gauge_was_read_nothing_is_known() -> None:
    """Nor when it does not say."""
    room = KvRoom()
    assert room.free(1000) is None
    room.polled(load(None), 1000, 1000)
    assert room.free(1000) is None


def test_what_was_sent_since_the_gauge_was_read_takes_room() -> None:
    """And what ended gives it back: 2,000 tokens filled a fifth."""
    room = KvRoom()
    room.polled(load(0.8), 2000, 2000)
    assert room.free(2000) == pytest.approx(0.8)
    assert room.free(5000) == pytest.approx(0.5)
    assert room.free(0) == pytest.approx(1.0)


def test_room_is_a_share() -> None:
    """Never less than none."""
    room = KvRoom()
    room.polled(load(0.8), 2000, 2000)
    assert room.free(50_000) == 0.0


def test_an_idle_gauge_teaches_no_capacity() -> None:
    """Until it does, the gauge is taken as it was."""
    room = KvRoom()
    room.polled(load(1.0), 2000, 2000)
    room.polled(load(0.99), 50, 50)
    assert room.free(9000) == 0.99


def test_the_gauge_wins_over_what_was_counted() -> None:
    """Every time that it is read."""
    room = KvRoom()
    room.polled(load(0.8), 2000, 2000)
    room.polled(load(0.5), 4000, 4000)
    assert room.free(4000) == 0.5


def test_what_does_not_fit_is_missing() -> None:
    """Only where the engine says how much it has."""
    room = KvRoom()
    assert room.missing_tokens(50_000) == 0
    room.polled(load(0.5), 5000, 5000)
    assert room.missing_tokens(50_000) == 0
    room.polled(load(0.5, 10_000), 5000, 5000)
    assert room.missing_tokens(10_000) == 0
    assert room.missing_tokens(12_500) == 2500
    assert room.share(2500) == 0.25
    room.forget()
    assert room.missing_tokens(50_000) == 0


def test_prompts_whose_memory_is_not_allocated_yet_count_in_full() -> None:
    """A gauge that is low since they wait does not make the memory larger."""
    room = KvRoom()
    for _ in range(50):
        room.polled(load(0.9, 10_000), 9000, 1000)
    assert room.missing_tokens(12_000) == 2000


def test_shared_memory_is_learned_and_forgotten() -> None:
    """Counted twice, filled once; when nobody shares any more, it counts in full again."""
    room = KvRoom()
    for _ in range(50):
        room.polled(load(0.5, 10_000), 10_000, 10_000)
    assert room.missing_tokens(19_900) == 0
    assert room.missing_tokens(22_000) == pytest.approx(2000, abs=20)
    for _ in range(50):
        room.polled(load(1.0, 10_000), 0, 0)
    assert room.missing_tokens(12_000) == pytest.approx(2000, abs=20)


def test_what_others_hold_is_not_there_for_ours() -> None:
    """Requests of other gateways are in the gauge, and in no count of ours."""
    room = KvRoom()
    room.polled(load(0.4, 10_000), 1000, 1000)
    assert room.missing_tokens(5000) == 0
    assert room.missing_tokens(6000) == 1000

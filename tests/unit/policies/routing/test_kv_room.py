"""Free KV memory between two looks at the gauge."""

from __future__ import annotations

import pytest

from policies.routing.kv_room import KvRoom


def test_before_the_gauge_was_read_nothing_is_known() -> None:
    """Nor when it does not say."""
    room = KvRoom()
    assert room.free(1000) is None
    room.polled(None, 1000)
    assert room.free(1000) is None


def test_what_was_sent_since_the_gauge_was_read_takes_room() -> None:
    """And what ended gives it back: 2,000 tokens filled a fifth."""
    room = KvRoom()
    room.polled(0.8, 2000)
    assert room.free(2000) == pytest.approx(0.8)
    assert room.free(5000) == pytest.approx(0.5)
    assert room.free(0) == pytest.approx(1.0)


def test_room_is_a_share() -> None:
    """Never less than none."""
    room = KvRoom()
    room.polled(0.8, 2000)
    assert room.free(50_000) == 0.0


def test_an_idle_gauge_teaches_no_capacity() -> None:
    """Until it does, the gauge is taken as it was."""
    room = KvRoom()
    room.polled(1.0, 2000)
    room.polled(0.99, 50)
    assert room.free(9000) == 0.99


def test_the_gauge_wins_over_what_was_counted() -> None:
    """Every time that it is read."""
    room = KvRoom()
    room.polled(0.8, 2000)
    room.polled(0.5, 4000)
    assert room.free(4000) == 0.5

"""The store is told how answers ended, if it can be told."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from gateway.request.outcomes import Outcomes
from policies.access import Stop
from prefix_store.base import StoreUnavailableError
from prefix_store.client import StoreClient


class Told:
    """Stands for a connection to a store; breaks when it is told to."""

    def __init__(self) -> None:
        self.outcomes: list[tuple[str, str, int]] = []
        self.gone = self.broken = self.closed = False

    def outcome(self, request_id: str, stop: str, output_tokens: int) -> None:
        if self.broken:
            raise StoreUnavailableError("gone")
        self.outcomes.append((request_id, stop, output_tokens))

    def wait_hang_up(self, timeout_s: float) -> bool:
        return self.gone

    def close(self) -> None:
        self.closed = True


def settle(outcomes: Outcomes, count: int) -> None:
    """Until so many were told or failed."""
    end = time.monotonic() + 10.0
    while (stats := outcomes.stats()).done + stats.failed < count:
        assert time.monotonic() < end
        time.sleep(0.001)


def test_a_store_server_takes_the_message(start_store: Any) -> None:
    """Over its real socket; the connection is good for more."""
    store = start_store()
    outcomes = Outcomes(store.socket)
    for number in range(2):
        outcomes.tell(f"r{number}", Stop.TOOL_USE, 7)
        settle(outcomes, number + 1)
    outcomes.close()
    assert (outcomes.stats().done, outcomes.stats().failed) == (2, 0)


def test_without_a_store_all_is_dropped_and_counted(tmp_path: Path) -> None:
    """Nothing raises."""
    outcomes = Outcomes(tmp_path / "nothing.sock")
    for number in range(100):
        outcomes.tell(str(number), Stop.END_TURN, 1)
    outcomes.close()
    outcomes.tell("late", Stop.END_TURN, 1)
    stats = outcomes.stats()
    assert (stats.done, stats.failed, stats.dropped, stats.waiting) == (0, 100, 1, 0)


def test_one_connection_is_kept_until_the_store_hangs_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is sent into a connection that is known to be dead."""
    clients = [Told(), Told()]
    made = iter(clients)
    monkeypatch.setattr(StoreClient, "connect", lambda *_args, **_more: next(made))
    outcomes = Outcomes(tmp_path / "store.sock")
    for number in range(3):
        outcomes.tell(str(number), Stop.END_TURN, 1)
        settle(outcomes, number + 1)
    clients[0].gone = True
    outcomes.tell("3", Stop.LENGTH, 2)
    outcomes.close()
    assert [told[0] for told in clients[0].outcomes] == ["0", "1", "2"]
    assert clients[1].outcomes == [("3", "length", 2)]
    assert all(client.closed for client in clients)


def test_a_store_that_is_away_is_left_alone_for_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One attempt a second, however much there is to say."""
    clients = [Told(), Told()]
    clients[0].broken = True
    made = iter(clients)
    monkeypatch.setattr(StoreClient, "connect", lambda *_args, **_more: next(made))
    now = [0.0]
    outcomes = Outcomes(tmp_path / "store.sock", clock=lambda: now[0])
    for number, now[0] in enumerate((0.0, 0.5, 1.5)):
        outcomes.tell(str(number), Stop.END_TURN, 1)
        settle(outcomes, number + 1)
    outcomes.close()
    assert (clients[0].outcomes, clients[0].closed) == ([], True)
    assert clients[1].outcomes == [("2", "end_turn", 1)]

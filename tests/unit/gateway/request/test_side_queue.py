"""Work beside the requests: in order, bounded, and never anybody's problem."""

from __future__ import annotations

import logging
import threading
import time

import pytest

from gateway.request.side_queue import SideQueue, SideQueueStats


class Gate:
    """A handler that waits until it is opened, and keeps what it got."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.opened = threading.Event()
        self.got: list[int] = []

    def __call__(self, batch: list[int]) -> None:
        self.entered.set()
        assert self.opened.wait(10)
        self.got += batch


def test_all_is_done_in_order() -> None:
    """Closing finishes what waits."""
    got: list[int] = []
    queue = SideQueue[int]("test", got.extend)
    for number in range(1000):
        queue.add(number)
    queue.close()
    queue.close()
    assert got == list(range(1000))
    assert queue.stats() == SideQueueStats(waiting=0, done=1000, dropped=0, failed=0)


def test_the_oldest_go_when_the_thread_is_slow() -> None:
    """Adding returns whatever the handler does."""
    gate = Gate()
    queue = SideQueue[int]("test", gate, max_weight=10)
    queue.add(0)
    assert gate.entered.wait(10)
    for number in range(1, 15):
        queue.add(number)
    queue.add(15, weight=8)
    assert queue.stats() == SideQueueStats(waiting=3, done=0, dropped=12, failed=0)
    gate.opened.set()
    queue.close()
    assert gate.got == [0, 13, 14, 15]


def test_what_is_too_heavy_or_too_late_is_dropped() -> None:
    """And makes nothing else go."""
    got: list[int] = []
    queue = SideQueue[int]("test", got.extend, max_weight=2)
    queue.add(1, weight=3)
    queue.close()
    queue.add(2)
    assert (got, queue.stats().dropped) == ([], 2)


@pytest.mark.parametrize("error", [OSError("full"), ZeroDivisionError()])
def test_failures_are_counted_and_the_thread_goes_on(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """Only what nobody expects is an error in the log."""
    got: list[int] = []

    def handle(batch: list[int]) -> None:
        if 1 in batch:
            raise error
        got.extend(batch)

    caplog.set_level(logging.ERROR)
    queue = SideQueue[int]("test", handle, expected=(OSError,))
    queue.add(1)
    end = time.monotonic() + 10.0
    while queue.stats().failed == 0:
        assert time.monotonic() < end
        time.sleep(0.001)
    queue.add(2)
    queue.close()
    assert (got, queue.stats().done, queue.stats().failed) == ([2], 1, 1)
    assert len(caplog.records) == isinstance(error, ZeroDivisionError)

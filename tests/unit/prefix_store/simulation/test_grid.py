"""Many replays: in processes or not, the same reports; a process that dies is an error."""

from __future__ import annotations

import os
import pickle
import signal
from dataclasses import replace

import pytest

from policies.access import PLAIN, Access, Retention
from policies.eviction import FifoEviction, LruEviction
from prefix_store.base import BlockHash
from prefix_store.simulation.base import SimulationError
from prefix_store.simulation.grid import Cell, TierPlan, optimum_of, replay_grid
from prefix_store.simulation.replay import ReplaySettings
from prefix_store.simulation.report import ReplayReport
from prefix_store.simulation.trace import Trace, TraceRequest

SETTINGS = ReplaySettings(warm_up=0.0, token_bytes=1)


def small_trace() -> Trace:
    """Three prompts in turns, of five blocks each."""
    requests = []
    for i in range(30):
        chain = [BlockHash(f"{i % 3}{'x' * block}".encode()) for block in range(5)]
        requests.append(TraceRequest(float(i), 0.5, 5, 1, 1, chain))
    return Trace("small", requests, 150, 15)


def cells() -> list[Cell]:
    lru = Cell("lru", (TierPlan("memory", 8, LruEviction()),))
    return [lru, Cell("fifo", (TierPlan("memory", 8, FifoEviction()),)), optimum_of(lru)]


def untimed(reports: list[ReplayReport]) -> list[ReplayReport]:
    return [replace(report, replay_s=0.0) for report in reports]


def test_processes_give_the_same_reports_in_the_same_order() -> None:
    """And tell how far they are."""
    told: list[tuple[int, int]] = []
    here = replay_grid(cells(), small_trace(), SETTINGS)
    there = replay_grid(
        cells(), small_trace(), SETTINGS, jobs=2, progress=lambda *each: told.append(each)
    )
    assert untimed(there) == untimed(here)
    assert [report.policy for report in there] == ["lru", "fifo", "optimum"]
    assert {(0, 30), (1, 30), (2, 30)} <= set(told)


def test_everything_a_process_needs_can_be_sent_to_it() -> None:
    """Where processes are not forked, a copy is sent."""
    plans, trace, settings = pickle.loads(pickle.dumps((cells(), small_trace(), SETTINGS)))
    copied = replay_grid(plans, trace, settings)
    assert untimed(copied) == untimed(replay_grid(cells(), small_trace(), SETTINGS))


def kill_process(access: Access) -> Retention:
    """Stands for a process that the system ends for want of memory."""
    if access.time_s > 3.0:
        os.kill(os.getpid(), signal.SIGKILL)
    return PLAIN


def test_process_that_dies_is_an_error_with_the_policys_name() -> None:
    """Not an endless wait."""
    doomed = replace(cells()[1], retention=kill_process)
    with pytest.raises(SimulationError, match="fifo ended too early"):
        replay_grid([cells()[0], doomed], small_trace(), SETTINGS, jobs=2)

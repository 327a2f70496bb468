"""Policies x capacities, each replayed in a process of its own."""

from __future__ import annotations

import contextlib
import enum
import multiprocessing
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import TypeAlias

from policies.access import Access, Retention
from policies.admission import ADMIT_ALL, AdmissionRule, all_of
from prefix_store.index import Eviction
from prefix_store.simulation.base import SimulationError
from prefix_store.simulation.future import Future
from prefix_store.simulation.optimum import Optimum
from prefix_store.simulation.replay import Replay, ReplaySettings
from prefix_store.simulation.report import ReplayReport
from prefix_store.simulation.tier import SimulatedTier
from prefix_store.simulation.trace import Trace


class Foresight(enum.Enum):
    """Stands for a policy that knows the future."""

    OPTIMUM = "optimum"
    BELADY = "belady"
    """Has to let every block in, as plain eviction policies do."""


SimulatedEviction: TypeAlias = Eviction | Foresight


@dataclass(frozen=True, slots=True)
class TierPlan:
    """One tier to be replayed."""

    name: str
    capacity_bytes: int
    eviction: SimulatedEviction
    admission: Sequence[AdmissionRule] = ADMIT_ALL
    write_on_save: bool = False


@dataclass(frozen=True, slots=True)
class Cell:
    """One replay: a named policy and the tiers from memory downwards."""

    policy: str
    tiers: tuple[TierPlan, ...]
    retention: Callable[[Access], Retention] | None = None


Progress = Callable[[int, int], None]
"""Is told the number of a cell and how many of its requests are done."""


def optimum_of(cell: Cell) -> Cell:
    """The same capacity in one tier whose policy knows the future."""
    capacity_bytes = sum(tier.capacity_bytes for tier in cell.tiers)
    return Cell("optimum", (TierPlan("memory", capacity_bytes, Foresight.OPTIMUM),))


def replay_cell(
    cell: Cell, trace: Trace, settings: ReplaySettings, progress: Callable[[int], None]
) -> ReplayReport:
    """One replay, here and now."""
    future = None
    tiers: list[SimulatedTier] = []
    below: SimulatedTier | None = None
    for plan in reversed(cell.tiers):
        eviction = plan.eviction
        if isinstance(eviction, Foresight):
            future = future or Future(trace.requests)
            eviction = Optimum(future.next_use, refuses=eviction is Foresight.OPTIMUM)
        below = SimulatedTier(
            plan.name,
            plan.capacity_bytes,
            eviction,
            gate=all_of(plan.admission),
            write_on_save=plan.write_on_save,
            below=below,
        )
        tiers.insert(0, below)
    replay = Replay(tiers, settings, future=future, retention=cell.retention)
    return replay.run(trace, cell.policy, progress)


def replay_grid(
    cells: Sequence[Cell],
    trace: Trace,
    settings: ReplaySettings,
    *,
    jobs: int = 1,
    progress: Progress = lambda _cell, _done: None,
) -> list[ReplayReport]:
    """A report for each cell, in their order. Raises SimulationError when a process dies."""
    if jobs <= 1 or len(cells) == 1:
        return [
            replay_cell(cell, trace, settings, _of_cell(progress, number))
            for number, cell in enumerate(cells)
        ]
    with _Crew(trace, settings) as crew:
        return crew.replay(cells, jobs, progress)


def _of_cell(progress: Progress, number: int) -> Callable[[int], None]:
    return lambda done: progress(number, done)


class _Crew:
    """Owns the processes; ending it ends them."""

    def __init__(self, trace: Trace, settings: ReplaySettings) -> None:
        # A forked child shares the trace with its parent instead of getting a copy.
        self._start_process: Callable[..., BaseProcess] = multiprocessing.get_context(
            "fork" if sys.platform == "linux" else "spawn"
        ).Process  # type: ignore[attr-defined]
        self._trace = trace
        self._settings = settings
        self._running: dict[Connection, int] = {}
        self._processes: dict[Connection, BaseProcess] = {}

    def __enter__(self) -> _Crew:
        return self

    def __exit__(self, *_: object) -> None:
        for connection, process in self._processes.items():
            process.terminate()
            process.join()
            connection.close()

    def replay(self, cells: Sequence[Cell], jobs: int, progress: Progress) -> list[ReplayReport]:
        reports: dict[int, ReplayReport] = {}
        waiting = list(enumerate(cells))
        waiting.reverse()
        while len(reports) < len(cells):
            while waiting and len(self._running) < jobs:
                self._start(*waiting.pop())
            for connection in wait(list(self._running)):
                assert isinstance(connection, Connection)
                number = self._running[connection]
                try:
                    message = connection.recv()
                except EOFError:
                    raise SimulationError(
                        f"the process that replayed {cells[number].policy} ended too early; "
                        "is there enough memory? try --jobs 1"
                    ) from None
                if isinstance(message, ReplayReport):
                    reports[number] = message
                    self._finish(connection)
                else:
                    progress(number, message)
        return [reports[number] for number in range(len(cells))]

    def _start(self, number: int, cell: Cell) -> None:
        ours, theirs = multiprocessing.Pipe(duplex=False)
        process = self._start_process(
            target=_work, args=(theirs, cell, self._trace, self._settings), daemon=True
        )
        # Ctrl-C goes to all processes of a terminal. It waits until the child ignores it and we
        # own the child.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()
            self._running[ours] = number
            self._processes[ours] = process
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()

    def _finish(self, connection: Connection) -> None:
        del self._running[connection]
        self._processes.pop(connection).join()
        connection.close()


def _work(connection: Connection, cell: Cell, trace: Trace, settings: ReplaySettings) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
    # A broken pipe: the parent is gone, so nobody wants the result.
    with contextlib.suppress(BrokenPipeError):
        connection.send(replay_cell(cell, trace, settings, connection.send))
    connection.close()

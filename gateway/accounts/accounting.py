"""Sums up ended requests, per replica and in all, over four windows of time.

No I/O. Memory is about 1 MB a replica whatever the uptime and the traffic; the windows' edges
are as exact as gateway/accounts/windows.py says.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence

import numpy as np
from numpy.typing import NDArray

from gateway.accounts import tally
from gateway.accounts.gauges import Gauges, ReplicaGauges
from gateway.accounts.prefill_curve import PrefillCurve
from gateway.accounts.record import FirstToken, Outcome, RequestRecord
from gateway.accounts.stats_schema import (
    CacheStats,
    CurvePoint,
    ReplicaStats,
    ScopeStats,
    WindowsStats,
)
from gateway.accounts.waterfall import Waterfall, waterfall
from gateway.accounts.windows import Window, Windows, first_tick

_Sums = dict[Window, tuple[NDArray[np.float64], NDArray[np.float64]]]


class _Ledger:
    """The sums of one replica, of those that are gone, or of the requests that reached none."""

    def __init__(self) -> None:
        self.columns = Windows(tally.NUM_COLUMNS)
        self.bins = Windows(tally.NUM_BINS, np.uint32)
        self.curve = PrefillCurve()

    def absorb(self, other: _Ledger, tick: int) -> None:
        """Take over its sums; what its replica's prefill costs is nobody's any more."""
        self.columns.absorb(other.columns, tick)
        self.bins.absorb(other.bins, tick)

    def sums(self, tick: int) -> _Sums:
        return {w: (self.columns.total(w, tick), self.bins.total(w, tick)) for w in Window}


class Accounting:
    """Accounts for every request exactly once, when it has ended."""

    def __init__(
        self,
        replicas: Sequence[str],
        *,
        model: str,
        version: str,
        block_size: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`replicas`: ids. `block_size`: tokens per block, the smallest of the replicas."""
        self._model = model
        self._version = version
        self._block_size = block_size
        self._clock = clock
        self._started_at = clock()
        self._ledgers = {replica: _Ledger() for replica in replicas}
        self._no_replica = _Ledger()
        self._gone = _Ledger()
        """Of replicas that are not there any more. Apart, so that no other sums jump."""

    def add_replica(self, replica: str) -> None:
        """It has sums of its own from now on."""
        self._ledgers.setdefault(replica, _Ledger())

    def remove_replica(self, replica: str) -> None:
        """What it did counts in the total only from now on."""
        ledger = self._ledgers.pop(replica, None)
        if ledger is not None:
            self._gone.absorb(ledger, int(self._uptime_s()))

    def record(self, record: RequestRecord) -> None:
        """Requests without a replica, or of one that is not there, count in the total only."""
        ledger = self._no_replica
        if record.replica is not None:
            ledger = self._ledgers.get(record.replica, self._gone)
        tick = int(self._uptime_s())
        cells = ledger.columns.cells(tick)
        tally.add_request(cells, record)
        if record.first_token is not None:
            tally.add_first_token(cells, ledger.bins.cells(tick), record.first_token)
        # Only a full answer carries the engine's report of what it reused.
        if record.outcome is not Outcome.OK or record.prompt is None:
            return
        steps = waterfall(record.prompt)
        # An engine computes at least the last token itself, so a block must end before it.
        tally.add_prompt(cells, steps, too_short=steps.total <= self._block_size)
        if record.first_token is not None:
            saving = _learn(ledger.curve, steps, record.first_token, record.load_s)
            if saving is not None:
                tally.add_saving(cells, saving)
        if record.load_s and not steps.delivered:
            tally.add_loss(cells, record.load_s)

    def rendering_checked(self, replica: str, confirmed: bool) -> None:
        """A sample of the renderings has a verdict."""
        ledger = self._ledgers.get(replica, self._gone)
        cells = ledger.columns.cells(int(self._uptime_s()))
        cells[tally.Column.RENDERINGS_CHECKED] += 1
        cells[tally.Column.RENDERINGS_UNCONFIRMED] += not confirmed

    def snapshot(self, *, gauges: Gauges) -> Generator[None, None, CacheStats]:
        """Everything as it stands at the first piece. Made in pieces of about a millisecond, one
        for each replica, between which others may run; returns the result."""
        uptime_s = self._uptime_s()
        ledgers = dict(self._ledgers)
        sums = {replica: ledger.sums(int(uptime_s)) for replica, ledger in ledgers.items()}
        no_replica = self._no_replica.sums(int(uptime_s))
        gone = self._gone.sums(int(uptime_s))
        yield
        replicas: dict[str, ReplicaStats] = {}
        for replica, ledger in ledgers.items():
            replicas[replica] = ReplicaStats(
                windows=_windows([sums[replica]], uptime_s),
                state=gauges.replicas.get(replica, ReplicaGauges()),
                prefill_curve=_curve(ledger.curve),
            )
            yield
        return CacheStats(
            version=self._version,
            model=self._model,
            uptime_s=uptime_s,
            in_flight=gauges.in_flight,
            waiting=gauges.waiting,
            loop_lag_s=gauges.loop_lag_s,
            total=ScopeStats(windows=_windows([*sums.values(), no_replica, gone], uptime_s)),
            without_replica=ScopeStats(windows=_windows([no_replica], uptime_s)),
            replicas=replicas,
            store=gauges.store,
            store_events=gauges.store_events,
            remote_stores=gauges.remote_stores,
            routing=gauges.routing,
            index=gauges.index,
            memo=gauges.memo,
            outcomes=gauges.outcomes,
            request_log=gauges.request_log,
        )

    def curve(self, replica: str) -> PrefillCurve:
        """The prefill curve of a replica. KeyError for one that is not there."""
        return self._ledgers[replica].curve

    def _uptime_s(self) -> float:
        return max(0.0, self._clock() - self._started_at)


def _learn(
    curve: PrefillCurve, steps: Waterfall, first: FirstToken, load_s: float
) -> tally.Saving | None:
    """Teaches the curve; the saving of a hit, judged by what was known before it. The engine's
    prefill time begins after the load."""
    if first.prefill_s is None:
        return None
    saving = None
    if steps.delivered > 0:
        cold = curve.predict(steps.total)
        if cold is not None:
            saving = tally.Saving(cold.prefill_s - first.prefill_s - load_s, cold.error_s)
    curve.observe(steps.uncached, steps.delivered, first.prefill_s)
    return saving


def _windows(ledgers: Sequence[_Sums], uptime_s: float) -> WindowsStats:
    parts = {
        window.value: tally.window_stats(
            _sum_of([sums[window][0] for sums in ledgers]),
            _sum_of([sums[window][1] for sums in ledgers]),
            covered_s=uptime_s - first_tick(window, int(uptime_s)),
        )
        for window in Window
    }
    return WindowsStats(**parts)


def _sum_of(vectors: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    """Element by element, of at least one vector."""
    total: NDArray[np.float64] = np.sum(vectors, axis=0)
    return total


def _curve(curve: PrefillCurve) -> list[CurvePoint]:
    return [
        CurvePoint(
            uncached_tokens=knot.uncached_tokens,
            prefill_s=knot.prefill_s,
            error_s=knot.prefill_s * knot.spread,
            observations=knot.observations,
        )
        for knot in curve.knots()
    ]

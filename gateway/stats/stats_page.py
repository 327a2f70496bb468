"""GET /cache/stats and GET /metrics: the accounting, and the state of everything right now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from engine_adapter.rendering import PromptRenderer
from gateway.accounts.accounting import Accounting
from gateway.accounts.gauges import (
    EventGauges,
    Gauges,
    IndexGauges,
    MemoGauges,
    ReplicaGauges,
    SideGauges,
)
from gateway.accounts.record import RequestRecord
from gateway.accounts.stats_schema import CacheStats
from gateway.fleet.choice import Replica
from gateway.fleet.followed_events import Followed
from gateway.fleet.places import Places
from gateway.request.side_queue import SideQueueStats
from gateway.stats.loop_lag import LoopLag
from gateway.stats.metrics import CONTENT_TYPE, Metrics
from gateway.stats.store_probe import StoreProbe
from gateway.web.exchange import Exchange
from prefix_store.residency import Residency


class Side(Protocol):
    """Work beside the requests."""

    def stats(self) -> SideQueueStats:
        """What it did."""


class StatsPage:
    """Reads from everybody, owns nothing but the Prometheus registry."""

    def __init__(
        self,
        *,
        accounting: Accounting,
        replicas: Sequence[Replica],
        places: Places,
        residency: Residency,
        renderer: PromptRenderer | None,
        memo_capacity_bytes: int,
        engine_events: Mapping[str, Followed],
        store_events: Followed | None,
        store: StoreProbe | None,
        loop_lag: LoopLag,
        outcomes: Side | None = None,
        request_log: Side | None = None,
    ) -> None:
        self._accounting = accounting
        self._replicas = replicas
        self._places = places
        self._residency = residency
        self._renderer = renderer
        self._memo_capacity_bytes = memo_capacity_bytes
        self._engine_events = engine_events
        self._store_events = store_events
        self._store = store
        self._loop_lag = loop_lag
        self._outcomes = outcomes
        self._request_log = request_log
        self._metrics = Metrics([replica.id for replica in replicas], self.snapshot)

    def record(self, record: RequestRecord) -> None:
        """One finished request, for both pages."""
        self._accounting.record(record)
        self._metrics.observe(record)

    async def cache_stats(self, exchange: Exchange) -> None:
        """GET /cache/stats."""
        await self._refresh()
        await exchange.send(200, self.snapshot().model_dump_json().encode())

    async def metrics(self, exchange: Exchange) -> None:
        """GET /metrics."""
        await self._refresh()
        await exchange.send(200, self._metrics.expose(), content_type=CONTENT_TYPE)

    def snapshot(self) -> CacheStats:
        """Everything as it stands; the store as it was when it was last asked."""
        return self._accounting.snapshot(gauges=self._gauges())

    async def _refresh(self) -> None:
        if self._store is not None:
            await self._store.refresh()

    def _gauges(self) -> Gauges:
        return Gauges(
            in_flight=self._places.running,
            waiting=self._places.waiting,
            loop_lag_s=self._loop_lag.lag_s,
            store=self._store.gauges if self._store else None,
            store_events=event_gauges(self._store_events) if self._store_events else None,
            index=self._index(),
            memo=self._memo(),
            outcomes=_side_gauges(self._outcomes),
            request_log=_side_gauges(self._request_log),
            replicas={replica.id: self._replica(replica) for replica in self._replicas},
        )

    def _replica(self, replica: Replica) -> ReplicaGauges:
        followed = self._engine_events.get(replica.id)
        return ReplicaGauges(
            in_flight=replica.client.in_flight,
            events=event_gauges(followed) if followed else None,
        )

    def _index(self) -> IndexGauges:
        stats = self._residency.stats()
        return IndexGauges(
            blocks=stats.nodes,
            used_bytes=stats.memory_bytes,
            capacity_bytes=stats.capacity_bytes,
            forgotten_resident_blocks=stats.evicted_resident,
        )

    def _memo(self) -> MemoGauges | None:
        if self._renderer is None:
            return None
        stats = self._renderer.stats()
        return MemoGauges(
            tokens_from_memo=stats.tokens_from_memo,
            tokens_tokenized=stats.tokens_tokenized,
            used_bytes=stats.memo_bytes,
            capacity_bytes=self._memo_capacity_bytes,
        )


def event_gauges(followed: Followed) -> EventGauges:
    """A stream's state in the words of the statistics."""
    state, source = followed.subscriber.state(), followed.source.stats()
    return EventGauges(
        connected=state.connected,
        incarnation=state.incarnation,
        last_sequence=state.last_sequence,
        lag_s=None if state.lag_s is None else max(0.0, state.lag_s),
        batches=state.batches,
        gaps=state.gaps,
        replays=state.replays,
        resyncs=state.resyncs,
        malformed=state.malformed + source.malformed,
        blocks=source.blocks,
        orphaned_blocks=source.orphans,
        refused_blocks=source.refused,
        refused_block_size_tokens=source.refused_block_size,
        overflow_blocks=source.overflow,
        foreign_events=source.foreign_groups + source.foreign_media,
    )


def _side_gauges(side: Side | None) -> SideGauges | None:
    if side is None:
        return None
    stats = side.stats()
    return SideGauges(
        done=stats.done, waiting=stats.waiting, dropped=stats.dropped, failed=stats.failed
    )

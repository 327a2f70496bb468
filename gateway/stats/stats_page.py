"""GET /cache/stats and GET /metrics: the accounting, and the state of everything right now."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator, Mapping, Sequence
from typing import Protocol, TypeVar

import msgspec

from engine_adapter.rendering import PromptRenderer
from gateway.accounts.accounting import Accounting
from gateway.accounts.gauges import (
    DecisionStats,
    EventGauges,
    Gauges,
    IndexGauges,
    MemoGauges,
    ReplicaGauges,
    RoutingGauges,
    SideGauges,
)
from gateway.accounts.record import RequestRecord
from gateway.accounts.stats_schema import CacheStats
from gateway.fleet.decisions import Decisions
from gateway.fleet.followed_events import Followed, FollowedEvents
from gateway.fleet.places import Places
from gateway.fleet.replica import Replica
from gateway.request.side_queue import SideQueueStats
from gateway.stats.loop_lag import LoopLag
from gateway.stats.metrics import CONTENT_TYPE, Metrics
from gateway.stats.store_probe import StoreProbe
from gateway.web.exchange import Exchange
from prefix_store.residency import Residency

T = TypeVar("T")


class Side(Protocol):
    """Work beside the requests."""

    def stats(self) -> SideQueueStats:
        """What it did."""


class Fleet(Protocol):
    """The replicas."""

    @property
    def replicas(self) -> Sequence[Replica]:
        """All that are there now."""


class StatsPage:
    """Reads from everybody, owns nothing but the histograms of /metrics."""

    def __init__(
        self,
        *,
        accounting: Accounting,
        places: Places,
        residency: Residency,
        renderers: Mapping[str, PromptRenderer],
        memo_capacity_bytes: int,
        events: FollowedEvents,
        routing: str,
        decisions: Decisions,
        store: StoreProbe | None,
        loop_lag: LoopLag,
        outcomes: Side | None = None,
        request_log: Side | None = None,
    ) -> None:
        self._accounting = accounting
        self._fleet: Fleet | None = None
        self._places = places
        self._residency = residency
        self._renderers = renderers
        self._memo_capacity_bytes = memo_capacity_bytes
        self._events = events
        self._routing = routing
        self._decisions = decisions
        self._store = store
        self._loop_lag = loop_lag
        self._outcomes = outcomes
        self._request_log = request_log
        self._metrics = Metrics()

    def show(self, fleet: Fleet) -> None:
        """The replicas whose state is served; each is told by `add_replica` as well."""
        self._fleet = fleet

    def add_replica(self, replica: str) -> None:
        """It may have requests from now on."""
        self._accounting.add_replica(replica)
        self._metrics.add_replica(replica)

    def remove_replica(self, replica: str) -> None:
        """It has none any more."""
        self._accounting.remove_replica(replica)
        self._metrics.remove_replica(replica)

    def record(self, record: RequestRecord) -> None:
        """One finished request, for both pages."""
        self._accounting.record(record)
        self._metrics.observe(record)

    async def cache_stats(self, exchange: Exchange) -> None:
        """GET /cache/stats."""
        await self._refresh()
        stats = await self.snapshot()
        await exchange.send(200, stats.model_dump_json().encode())

    async def metrics(self, exchange: Exchange) -> None:
        """GET /metrics."""
        await self._refresh()
        page = await in_between(self._metrics.exposing(await self.snapshot()))
        await exchange.send(200, page, content_type=CONTENT_TYPE)

    async def snapshot(self) -> CacheStats:
        """Everything as it stands; the store as it was when it was last asked."""
        return await in_between(self._accounting.snapshot(gauges=self._gauges()))

    async def _refresh(self) -> None:
        if self._store is not None:
            await self._store.refresh()

    def _gauges(self) -> Gauges:
        return Gauges(
            in_flight=self._places.running,
            waiting=self._places.waiting,
            loop_lag_s=self._loop_lag.lag_s,
            store=self._store.gauges if self._store else None,
            store_events=event_gauges(self._events.store) if self._events.store else None,
            remote_stores={
                name: event_gauges(each)
                for name, each in self._events.stores.items()
                if each is not self._events.store
            },
            routing=self._routing_gauges(),
            index=self._index(),
            memo=self._memo(),
            outcomes=_side_gauges(self._outcomes),
            request_log=_side_gauges(self._request_log),
            replicas={each.id: self._replica(each) for each in self._replicas},
        )

    @property
    def _replicas(self) -> Sequence[Replica]:
        return () if self._fleet is None else self._fleet.replicas

    def _routing_gauges(self) -> RoutingGauges:
        decisions = self._decisions
        return RoutingGauges(
            kind=self._routing,
            by_evidence=dict(decisions.by_evidence),
            by_reason=dict(decisions.by_reason),
            retries=dict(decisions.retries),
            joined=decisions.joined,
            recent=[
                DecisionStats.model_validate(msgspec.to_builtins(line))
                for line in decisions.recent()
            ],
        )

    def _replica(self, replica: Replica) -> ReplicaGauges:
        followed = self._events.engines.get(replica.id)
        condition, estimate = replica.condition, replica.estimate
        return ReplicaGauges(
            url=replica.config.url,
            model=replica.config.model,
            condition=condition.state.value,
            reason=condition.reason,
            condition_age_s=condition.age_s,
            ejections=condition.ejections,
            share=condition.share(time.monotonic()),
            in_flight=replica.places.running,
            waiting=replica.places.waiting,
            engine_running=estimate.running,
            engine_waiting=estimate.waiting,
            kv_free=estimate.kv_free,
            evidence=self._events.evidence(replica.id).value,
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
        """Of all models together."""
        stats = [renderer.stats() for renderer in self._renderers.values()]
        if not stats:
            return None
        return MemoGauges(
            tokens_from_memo=sum(each.tokens_from_memo for each in stats),
            tokens_tokenized=sum(each.tokens_tokenized for each in stats),
            used_bytes=sum(each.memo_bytes for each in stats),
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


async def in_between(work: Generator[None, None, T]) -> T:
    """The work's result; after each of its pieces whoever waits for the loop comes first."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result
        await asyncio.sleep(0)


def _side_gauges(side: Side | None) -> SideGauges | None:
    if side is None:
        return None
    stats = side.stats()
    return SideGauges(
        done=stats.done, waiting=stats.waiting, dropped=stats.dropped, failed=stats.failed
    )

"""Metrics of the fleet: the replicas, their event streams, and where requests were sent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from gateway.accounts.gauges import EventGauges, ReplicaGauges, RoutingGauges
from gateway.accounts.stats_schema import CacheStats
from gateway.stats.metric_families import counter

STORE_SOURCE = "store"
"""Label of our store's event stream; those of replicas and remote stores carry their ids."""

CONDITIONS = ("starting", "ready", "ejected", "draining")


def fleet_metrics(stats: CacheStats) -> Iterator[Metric]:
    """All of them."""
    states = {replica: each.state for replica, each in stats.replicas.items()}
    yield from _replicas(states)
    if stats.routing is not None:
        yield from _routing(stats.routing)
    streams = {name: state.events for name, state in states.items() if state.events is not None}
    streams |= stats.remote_stores
    if stats.store_events is not None:
        streams[STORE_SOURCE] = stats.store_events
    yield from _events(streams)


_REPLICA_GAUGES = (
    ("in_flight", "requests_in_flight", "Requests of this gateway that a replica works on."),
    ("waiting", "requests_waiting", "Requests that wait here for a place at a replica."),
    ("engine_running", "engine_running", "Requests with a first token, other gateways' too."),
    ("engine_waiting", "engine_waiting", "Requests without one, other gateways' too."),
    ("kv_free", "kv_free_ratio", "Share of its KV memory that no running request holds."),
    ("share", "share_ratio", "Of the requests that it may get; below 1 in a slow start."),
)


def _replicas(states: Mapping[str, ReplicaGauges]) -> Iterator[Metric]:
    for field, name, text in _REPLICA_GAUGES:
        family = GaugeMetricFamily(f"headstart_replica_{name}", text, labels=("replica",))
        for replica, state in states.items():
            value: float | None = getattr(state, field)
            if value is not None:
                family.add_metric((replica,), value)
        yield family
    conditions = GaugeMetricFamily(
        "headstart_replica_condition",
        "1 for the condition that a replica is in.",
        labels=("replica", "condition"),
    )
    exact = GaugeMetricFamily(
        "headstart_replica_exact",
        "1 when what a replica holds is known from its events, 0 when it is guessed.",
        labels=("replica",),
    )
    ejections = counter("replica_ejections", "Times a replica was ejected.", "replica")
    for replica, state in states.items():
        if state.condition is not None:
            for condition in CONDITIONS:
                conditions.add_metric((replica, condition), state.condition == condition)
        if state.evidence is not None:
            exact.add_metric((replica,), state.evidence == "exact")
        if state.ejections is not None:
            ejections.add_metric((replica,), state.ejections)
    yield from (conditions, exact, ejections)


def _routing(routing: RoutingGauges) -> Iterator[Metric]:
    for name, text, label, counts in (
        ("routing_decisions", "Decisions by what was known.", "evidence", routing.by_evidence),
        ("routing_reasons", "Decisions by the policy's reason.", "reason", routing.by_reason),
        ("routing_retries", "Further attempts, by what went wrong.", "error", routing.retries),
    ):
        family = counter(name, text, label)
        for value, count in counts.items():
            family.add_metric((value,), count)
        yield family
    joined = counter(
        "routing_joined", "Requests that waited for a prefix which another one was computing."
    )
    joined.add_metric((), routing.joined)
    yield joined


_EVENT_COUNTERS = (
    ("batches", "Batches received."),
    ("gaps", "Breaks in the sequence."),
    ("replays", "Replays asked for."),
    ("resyncs", "Times a publisher was forgotten."),
    ("malformed", "Messages that were not understood."),
    ("orphaned_blocks", "Blocks below an unknown parent."),
    ("refused_blocks", "Blocks of another size than the gateway's."),
    ("overflow_blocks", "Blocks left out since there were too many."),
    ("foreign_events", "Events of media or groups that nothing here can reuse."),
)


_EVENT_GAUGES = (
    ("connected", "events_connected", "1 when KV events arrive."),
    ("incarnation", "events_incarnation", "Lives of the publisher seen."),
    ("last_sequence", "events_last_sequence", "Sequence number of the newest batch."),
    ("lag_s", "events_lag_seconds", "Age of the newest batch when applied."),
    ("blocks", "events_blocks", "Blocks that the publisher has."),
)


def _events(streams: Mapping[str, EventGauges]) -> Iterator[Metric]:
    families: list[tuple[str, CounterMetricFamily | GaugeMetricFamily]] = [
        (field, GaugeMetricFamily(f"headstart_{name}", text, labels=("source",)))
        for field, name, text in _EVENT_GAUGES
    ]
    families += [
        (field, counter(f"events_{field}", text, "source")) for field, text in _EVENT_COUNTERS
    ]
    for field, family in families:
        for source, events in streams.items():
            value: float | None = getattr(events, field)
            if value is not None:
                family.add_metric((source,), float(value))
        yield family

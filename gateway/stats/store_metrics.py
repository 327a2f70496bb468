"""The store's part of GET /metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.metrics_core import Metric

from gateway.accounts.gauges import PolicyGauges, StoreGauges, TierGauges
from gateway.stats.metric_families import counter, gauge, gauges


def store_metrics(store: StoreGauges | None) -> Iterator[Metric]:
    """Of a store that does not answer there is headstart_store_up alone."""
    yield gauge("store_up", "1 when the store answers.", float(store is not None))
    if store is None:
        return
    yield gauge("store_engines", "Engines that are connected.", len(store.engines))
    for name, text, value in (
        ("store_capacity_bytes", "Size of the arena.", store.capacity_bytes),
        ("store_used_bytes", "Bytes of committed blocks.", store.used_bytes),
        ("store_reserved_bytes", "Bytes that are being written.", store.reserved_bytes),
        ("store_blocks", "Committed blocks.", store.blocks),
        ("store_leases", "Leases right now.", store.leases),
        ("store_leased_blocks", "Protected from eviction.", store.leased_blocks),
    ):
        yield gauge(name, text, value)
    for name, text, count in (
        ("store_lookups", "Prefixes looked up.", store.lookups),
        ("store_asked_blocks", "Blocks looked up.", store.asked_blocks),
        ("store_matched_blocks", "Blocks found.", store.matched_blocks),
        ("store_loads", "Loads by engines.", store.loads),
        ("store_failed_loads", "Loads that failed.", store.failed_loads),
        ("store_loaded_tokens", "Tokens that engines loaded.", store.loaded_tokens),
        ("store_loaded_bytes", "Bytes that engines loaded.", store.loaded_bytes),
        ("store_stored_blocks", "Blocks that engines saved.", store.stored_blocks),
        ("store_duplicate_blocks", "Saved twice at once.", store.duplicate_blocks),
        ("store_orphaned_blocks", "Not taken, parent gone.", store.orphaned_blocks),
        ("store_refused_blocks", "Not taken, no place.", store.refused_blocks),
        ("store_expired_leases", "Leases that ran out.", store.expired_leases),
        ("store_expired_reservations", "Writes given up.", store.expired_reservations),
    ):
        family = counter(name, text)
        family.add_metric((), count)
        yield family
    evicted = counter("store_evicted_blocks", "Blocks that went.", "reason")
    for reason, count in store.evicted_blocks.items():
        evicted.add_metric((reason,), count)
    yield evicted
    yield from _tiers(store.tiers)
    if store.policies is not None:
        yield from _policies(store.policies)


def _policies(policies: PolicyGauges) -> Iterator[Metric]:
    yield gauge(
        "store_policies_current",
        "1 when the newest configuration is in force.",
        float(policies.error is None and not policies.needs_restart),
    )
    reloads = counter("store_policy_reloads", "Changed configurations.", "result")
    reloads.add_metric(("taken",), policies.reloads)
    reloads.add_metric(("refused",), policies.refused)
    yield reloads


_TIER_GAUGES: tuple[tuple[str, str, Callable[[TierGauges], float | None]], ...] = (
    ("store_tier_capacity_bytes", "What a tier may hold.", lambda t: t.capacity_bytes),
    ("store_tier_used_bytes", "What a tier holds.", lambda t: t.used_bytes),
    ("store_tier_blocks", "Blocks in a tier.", lambda t: t.blocks),
    ("store_tier_latency_seconds", "Before the first byte of a read.", lambda t: t.latency_s),
    ("store_tier_bytes_per_second", "As measured lately.", lambda t: t.bandwidth_bytes_s),
    (
        "store_tier_up",
        "0 while a tier is left alone after faults.",
        lambda t: float(t.breaker != "open"),
    ),
)
_TIER_COUNTERS: tuple[tuple[str, str, Callable[[TierGauges], float]], ...] = (
    ("store_tier_stored_blocks", "Blocks written.", lambda t: t.stored_blocks),
    ("store_tier_refused_blocks", "Blocks not admitted.", lambda t: t.refused_blocks),
    ("store_tier_written_bytes", "Bytes written.", lambda t: t.written_bytes),
    ("store_tier_read_bytes", "Bytes read.", lambda t: t.read_bytes),
    ("store_tier_faults", "Reads and writes that failed.", lambda t: t.faults),
)


def _tiers(tiers: Sequence[TierGauges]) -> Iterator[Metric]:
    """Those below memory, by name."""
    for name, text, value in _TIER_GAUGES:
        family = gauges(name, text, "tier")
        for tier in tiers:
            if (known := value(tier)) is not None:
                family.add_metric((tier.name,), known)
        yield family
    for name, text, count in _TIER_COUNTERS:
        total = counter(name, text, "tier")
        for tier in tiers:
            total.add_metric((tier.name,), count(tier))
        yield total
    evicted = counter("store_tier_evicted_blocks", "Blocks that went.", "tier", "reason")
    for tier in tiers:
        for reason, blocks in tier.evicted_blocks.items():
            evicted.add_metric((tier.name, reason), blocks)
    yield evicted

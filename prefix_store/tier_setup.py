"""From the configuration to the tiers below memory, and from them to figures."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

from policies.admission import all_of
from policies.config import (
    DiskTierConfig,
    LowerTierConfig,
    RedisTierConfig,
    StoreConfig,
    pin_budget_of,
)
from policies.eviction.retained import Retained
from prefix_store import events, protocol
from prefix_store.backend import Backend
from prefix_store.disk_backend import DiskBackend
from prefix_store.lower_tier import LowerTier, LowerTierSettings
from prefix_store.redis_backend import RedisBackend

Publish = Callable[[list[events.KVEvent]], None]


def settings_of(config: LowerTierConfig) -> LowerTierSettings:
    """What a tier has to know of its configuration."""
    shared = isinstance(config, RedisTierConfig)
    return LowerTierSettings(
        name="redis" if shared else "disk",
        medium=events.MEDIUM_REDIS if shared else events.MEDIUM_STORAGE,
        capacity_bytes=int(config.capacity),
        eviction=Retained(config.eviction, pin_budget_of(config)),
        shared=shared,
    )


async def start_lower_tiers(store: StoreConfig, publish: Publish) -> list[LowerTier]:
    """From the tier next to memory downwards, ready to use. Raises StoreError."""
    async with AsyncExitStack() as started:
        below: LowerTier | None = None
        tiers: list[LowerTier] = []
        for config in (store.redis, store.disk):
            if config is None:
                continue
            tier = LowerTier(
                settings_of(config),
                _backend(config, store.id),
                all_of(config.admission),
                publish,
                below=below,
            )
            started.push_async_callback(tier.close)
            await tier.start()
            tiers.insert(0, tier)
            below = tier
        started.pop_all()
        return tiers


def on_save_tiers(store: StoreConfig, tiers: list[LowerTier]) -> list[LowerTier]:
    """Those that get blocks as soon as they are saved."""
    configs = {"disk": store.disk, "redis": store.redis}
    return [
        tier
        for tier in tiers
        if (config := configs[tier.settings.name]) is not None and config.write == "on_save"
    ]


async def apply_policies(before: StoreConfig, now: StoreConfig, tiers: list[LowerTier]) -> None:
    """Other policies and quotas for running tiers. A policy that has not changed keeps what it has
    learned."""
    old = {"disk": before.disk, "redis": before.redis}
    new = {"disk": now.disk, "redis": now.redis}
    for tier in tiers:
        name = tier.settings.name
        former, config = old[name], new[name]
        if config is None or config == former:
            continue
        same_gate = former is not None and former.admission == config.admission
        gate = tier.gate if same_gate else all_of(config.admission)
        await tier.apply(settings_of(config), gate)


def tier_stats(tier: LowerTier) -> protocol.TierStats:
    """The tier's state in the store's answer."""
    counters = tier.counters
    return protocol.TierStats(
        name=tier.settings.name,
        capacity_bytes=tier.settings.capacity_bytes,
        used_bytes=tier.used_bytes,
        blocks=len(tier),
        blocks_stored=counters.blocks_stored,
        blocks_refused=counters.blocks_refused,
        bytes_written=counters.bytes_written,
        bytes_read=counters.bytes_read,
        faults=tier.faults,
        evictions={reason.value: n for reason, n in counters.removals.items()},
        latency_ms=tier.reads.latency_s * 1000,
        bandwidth_bytes_s=tier.reads.bytes_per_s or tier.writes.bytes_per_s,
        breaker=tier.breaker,
    )


def _backend(config: DiskTierConfig | RedisTierConfig, store_id: str) -> Backend:
    if isinstance(config, DiskTierConfig):
        return DiskBackend(
            Path(config.path).expanduser(), int(config.capacity), direct=config.direct
        )
    return RedisBackend(config.url, store_id, timeout_s=config.timeout)

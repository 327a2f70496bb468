"""Asks the store server of this host how it is, for the statistics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gateway.accounts.gauges import PolicyGauges, StoreGauges, TierGauges
from prefix_store.base import StoreError
from prefix_store.client import StoreClient
from prefix_store.protocol import StoreStats, TierStats

_TIMEOUT_S = 1.0
_MAX_AGE_S = 0.25


class StoreProbe:
    """Keeps one connection, and asks in a thread: the store must never hold up the event loop."""

    def __init__(self, socket: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._socket = socket
        self._clock = clock
        self._client: StoreClient | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store-probe")
        self._lock = asyncio.Lock()
        self._asked_at = float("-inf")
        self.gauges: StoreGauges | None = None
        """As it was when it was last asked; None when it did not answer."""

    async def refresh(self) -> None:
        """Ask again, unless it was asked just now."""
        async with self._lock:
            if self._clock() - self._asked_at < _MAX_AGE_S:
                return
            # One thread: when a client of the statistics leaves, the question goes on in it.
            loop = asyncio.get_running_loop()
            self.gauges = await loop.run_in_executor(self._thread, self._ask)
            self._asked_at = self._clock()

    def close(self) -> None:
        """Give the connection up; waits for a question that still runs, at most a second."""
        self._thread.shutdown()
        self._disconnect()

    def _disconnect(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def _ask(self) -> StoreGauges | None:
        try:
            if self._client is None or self._client.closed:
                self._disconnect()
                self._client = StoreClient.connect(
                    self._socket, client="gateway", timeout_s=_TIMEOUT_S
                )
            return store_gauges(self._client.stats())
        except StoreError:
            self._disconnect()
            return None


def store_gauges(stats: StoreStats) -> StoreGauges:
    """The store's report in the words of the statistics."""
    return StoreGauges(
        id=stats.store,
        incarnation=stats.incarnation,
        uptime_s=stats.uptime_s,
        engines=stats.connectors,
        capacity_bytes=stats.capacity_bytes,
        used_bytes=stats.used_bytes,
        reserved_bytes=stats.reserved_bytes,
        blocks=stats.blocks,
        leases=stats.leases,
        leased_blocks=stats.leased_blocks,
        lookups=stats.matches,
        asked_blocks=stats.blocks_asked,
        matched_blocks=stats.blocks_matched,
        loads=stats.loads,
        failed_loads=stats.loads_failed,
        loaded_tokens=stats.tokens_loaded,
        loaded_bytes=stats.bytes_loaded,
        stored_blocks=stats.blocks_stored,
        duplicate_blocks=stats.blocks_duplicate,
        orphaned_blocks=stats.blocks_orphaned,
        refused_blocks=stats.blocks_refused,
        expired_leases=stats.leases_expired,
        expired_reservations=stats.reservations_expired,
        evicted_blocks=stats.evictions,
        tiers=[_tier_gauges(tier) for tier in stats.tiers],
        policies=PolicyGauges(
            reloads=stats.policies.reloads,
            refused=stats.policies.refused,
            error=stats.policies.error or None,
            needs_restart=stats.policies.needs_restart,
        ),
    )


def _tier_gauges(tier: TierStats) -> TierGauges:
    return TierGauges(
        name=tier.name,
        capacity_bytes=tier.capacity_bytes,
        used_bytes=tier.used_bytes,
        blocks=tier.blocks,
        stored_blocks=tier.blocks_stored,
        refused_blocks=tier.blocks_refused,
        written_bytes=tier.bytes_written,
        read_bytes=tier.bytes_read,
        faults=tier.faults,
        evicted_blocks=tier.evictions,
        latency_s=tier.latency_ms / 1000.0 or None,
        bandwidth_bytes_s=tier.bandwidth_bytes_s or None,
        breaker=tier.breaker or None,
    )

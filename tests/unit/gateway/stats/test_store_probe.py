"""The store's state for the statistics: asked in a thread, and absent without drama."""

from __future__ import annotations

import asyncio
import threading

import msgspec
import pytest

from gateway.accounts.gauges import PolicyGauges, TierGauges
from gateway.stats.store_probe import StoreProbe, store_gauges
from prefix_store.client import StoreClient
from prefix_store.protocol import PolicyStats, StoreStats, TierStats

STATS = StoreStats(
    store="store-0",
    incarnation=3,
    uptime_s=1.5,
    capacity_bytes=100,
    used_bytes=50,
    reserved_bytes=10,
    blocks=5,
    leases=1,
    leased_blocks=2,
    connectors=["engine-0"],
    matches=7,
    blocks_asked=70,
    blocks_matched=60,
    blocks_stored=6,
    blocks_duplicate=0,
    blocks_orphaned=0,
    blocks_refused=0,
    evictions={"capacity": 1},
    leases_expired=0,
    reservations_expired=0,
    loads=4,
    loads_failed=1,
    tokens_loaded=128,
    bytes_loaded=1280,
    tiers=[
        TierStats("disk", 1000, 500, 6, 8, 2, 4, 3, 1, {"capacity": 2}, 2.5, 1e6, "closed"),
        TierStats("redis"),
    ],
    policies=PolicyStats(2, "line 3: bad", ["store.id"], 1),
)


class FixedClient:
    """Answers, until it is told not to."""

    def __init__(self) -> None:
        self.closed = False
        self.asked = 0

    def stats(self) -> StoreStats:
        self.asked += 1
        return STATS

    def close(self) -> None:
        self.closed = True


async def test_no_store_is_no_answer(tmp_path):
    """And no error either."""
    probe = StoreProbe(tmp_path / "nothing.sock")
    await probe.refresh()
    assert probe.gauges is None
    probe.close()


async def test_the_connection_is_kept_and_made_again(tmp_path, monkeypatch):
    """One connection for many questions; a new one when the store has restarted."""
    clients = [FixedClient(), FixedClient()]
    made = iter(clients)
    monkeypatch.setattr(StoreClient, "connect", lambda *_args, **_more: next(made))
    now = [0.0]
    probe = StoreProbe(tmp_path / "store.sock", clock=lambda: now[0])
    for _ in range(3):
        await probe.refresh()
        now[0] += 10.0
    assert clients[0].asked == 3
    clients[0].closed = True
    await probe.refresh()
    assert clients[1].asked == 1
    probe.close()
    assert clients[1].closed


async def test_two_questions_at_once_are_one(tmp_path, monkeypatch):
    """However often the page is read."""
    client = FixedClient()
    monkeypatch.setattr(StoreClient, "connect", lambda *_args, **_more: client)
    probe = StoreProbe(tmp_path / "store.sock", clock=lambda: 0.0)
    await probe.refresh()
    await probe.refresh()
    assert client.asked == 1
    probe.close()


async def test_questions_never_overlap_even_when_who_asked_leaves(tmp_path, monkeypatch):
    """A client is for one thread at a time, and nobody closes it in the middle."""
    going_on, release = threading.Event(), threading.Event()

    class SlowClient(FixedClient):
        inside = most = 0

        def stats(self) -> StoreStats:
            self.inside += 1
            self.most = max(self.most, self.inside)
            going_on.set()
            assert release.wait(10)
            assert not self.closed
            self.inside -= 1
            return super().stats()

    client = SlowClient()
    monkeypatch.setattr(StoreClient, "connect", lambda *_args, **_more: client)
    probe = StoreProbe(tmp_path / "store.sock")
    leaving = asyncio.create_task(probe.refresh())
    assert await asyncio.to_thread(going_on.wait, 10)
    leaving.cancel()
    await asyncio.wait([leaving])
    staying = asyncio.create_task(probe.refresh())
    await asyncio.sleep(0.05)  # a second thread would have come in by now
    release.set()
    await staying
    probe.close()
    assert (client.most, client.asked, client.closed) == (1, 2, True)


@pytest.mark.parametrize(
    ("gauge", "value"),
    [
        ("id", "store-0"),
        ("engines", ["engine-0"]),
        ("capacity_bytes", 100),
        ("used_bytes", 50),
        ("lookups", 7),
        ("asked_blocks", 70),
        ("matched_blocks", 60),
        ("loads", 4),
        ("failed_loads", 1),
        ("loaded_tokens", 128),
        ("loaded_bytes", 1280),
        ("stored_blocks", 6),
        ("evicted_blocks", {"capacity": 1}),
    ],
)
def test_gauges_are_the_stores_numbers(gauge, value):
    """By their names in the statistics."""
    assert getattr(store_gauges(STATS), gauge) == value


def test_tiers_are_the_stores_numbers():
    """What it has not measured, or has not got, is null and not 0."""
    disk, redis = store_gauges(STATS).tiers
    assert disk == TierGauges(
        name="disk",
        capacity_bytes=1000,
        used_bytes=500,
        blocks=6,
        stored_blocks=8,
        refused_blocks=2,
        written_bytes=4,
        read_bytes=3,
        faults=1,
        evicted_blocks={"capacity": 2},
        latency_s=0.0025,
        bandwidth_bytes_s=1e6,
        breaker="closed",
    )
    assert (redis.latency_s, redis.bandwidth_bytes_s, redis.breaker) == (None, None, None)


def test_policies_are_the_stores_words():
    """No error is null."""
    assert store_gauges(STATS).policies == PolicyGauges(
        reloads=2, refused=1, error="line 3: bad", needs_restart=["store.id"]
    )
    fine = msgspec.structs.replace(STATS, policies=PolicyStats())
    assert store_gauges(fine).policies.error is None

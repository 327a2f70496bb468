"""The doctor looks at the tiers below memory."""

from __future__ import annotations

import pytest

from gateway.doctor.finding import Finding, Level
from gateway.doctor.tiers import check_policies, check_tiers
from policies.config import StoreConfig
from prefix_store.protocol import PolicyStats, TierStats

BOTH = StoreConfig.model_validate(
    {"disk": {"path": "/blocks"}, "redis": {"url": "redis://me:hush@cache:6380/1"}}
)
DISK = TierStats("disk", capacity_bytes=2**34, used_bytes=2**30, blocks=1000, breaker="closed")
REDIS = TierStats("redis", capacity_bytes=2**32, breaker="closed")


def findings(config: StoreConfig, *tiers: TierStats) -> list[Finding]:
    return list(check_tiers(config, list(tiers)))


def test_only_what_is_configured_is_looked_for() -> None:
    """A store with memory alone is fine."""
    assert findings(StoreConfig()) == []


def test_tiers_in_use_are_well() -> None:
    """With what they hold."""
    disk, redis = findings(BOTH, DISK, REDIS)
    assert (disk.level, redis.level) == (Level.OK, Level.OK)
    assert disk.line() == "ok    store disk: 1.00 of 16.00 GiB used, 1,000 blocks"


def test_a_store_that_was_started_before_is_found() -> None:
    """It does not know of the tier yet."""
    disk, redis = findings(BOTH, DISK)
    assert (disk.level, redis.level) == (Level.OK, Level.FAIL)
    assert "start `headstart store` anew" in redis.detail


@pytest.mark.parametrize(
    ("breaker", "level"),
    [("open", Level.FAIL), ("half_open", Level.WARN), ("closed", Level.WARN)],
)
def test_faults_are_said_with_what_to_look_at(breaker: str, level: Level) -> None:
    """Place and key, but no password."""
    redis = TierStats("redis", faults=7, breaker=breaker)
    disk = TierStats("disk", faults=7, breaker=breaker)
    found = findings(BOTH, disk, redis)
    assert [finding.level for finding in found] == [level, level]
    assert "7 faults" in found[0].detail
    assert "/blocks (store.disk.path)" in found[0].detail
    assert "Redis at cache:6380 (store.redis.url)" in found[1].detail
    assert "hush" not in found[1].detail


def test_a_socket_is_named_by_its_path() -> None:
    """There is no host."""
    config = StoreConfig.model_validate({"redis": {"url": "unix:///run/redis.sock"}})
    (finding,) = findings(config, TierStats("redis", breaker="open"))
    assert "Redis at /run/redis.sock" in finding.detail


def test_a_configuration_that_is_not_in_force_is_found() -> None:
    """With the reason, or the keys that wait."""
    assert list(check_policies(PolicyStats(reloads=3))) == []
    (refused,) = check_policies(PolicyStats(error="line 3: bad", needs_restart=["store.id"]))
    (waiting,) = check_policies(PolicyStats(needs_restart=["store.id", "store.disk"]))
    assert (refused.level, waiting.level) == (Level.FAIL, Level.WARN)
    assert "line 3: bad" in refused.detail
    assert "store.id, store.disk" in waiting.detail

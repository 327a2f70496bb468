"""Where blocks may lie that a replica can reuse."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.fleet.holders import holders_of, store_of
from policies.config import HeadstartConfig

REMOTE = {"events": "tcp://b:1", "events_replay": "tcp://b:2"}


def holders(engine: dict[str, Any], **config: Any) -> set[str]:
    """Of that engine, written as source/medium; its own memory comes first."""
    parsed = HeadstartConfig.model_validate({"engines": [{"id": "e", **engine}], **config})
    found = holders_of(parsed, parsed.engines[0])
    assert (found[0].source, found[0].medium.value) == ("e", "device")
    assert len(set(found)) == len(found)
    return {f"{each.source}/{each.medium.value}" for each in found[1:]}


@pytest.mark.parametrize(
    ("engine", "config", "expected"),
    [
        ({}, {"store": None}, set()),
        ({}, {}, {"store-0/memory"}),
        ({}, {"store": {"id": "s", "disk": {"path": "x"}}}, {"s/memory", "s/disk"}),
        ({}, {"store": {"redis": {}}}, {"store-0/memory", "store-0/redis"}),
        (
            {"store": "far"},
            {"remote_stores": [{"id": "far", **REMOTE}]},
            {"far/memory", "far/disk", "far/redis"},
        ),
        (
            {},
            {"store": {"redis": {}}, "remote_stores": [{"id": "far", **REMOTE}]},
            {"store-0/memory", "store-0/redis"},
        ),
    ],
    ids=["no store", "memory", "disk", "redis", "another host's store", "another host's Redis"],
)
def test_a_replica_reaches_the_tiers_of_its_hosts_store(
    engine: dict[str, Any], config: dict[str, Any], expected: set[str]
) -> None:
    """Of the store of another host nothing, unless they share a Redis."""
    assert holders(engine, **config) == expected


def test_a_shared_redis_is_reached_from_every_host() -> None:
    """What one store keeps there the others load, in both directions; memory and disk stay with
    their host."""
    shared: dict[str, Any] = {
        "store": {"redis": {}},
        "remote_stores": [
            {"id": "far", "shares_redis": True, **REMOTE},
            {"id": "own", **REMOTE},
        ],
    }
    near = {"store-0/memory", "store-0/redis", "far/redis"}
    assert holders({}, **shared) == near
    assert holders({"store": "far"}, **shared) == {
        "far/memory",
        "far/disk",
        "far/redis",
        "store-0/redis",
    }
    assert holders({"store": "own"}, **shared) == {"own/memory", "own/disk", "own/redis"}


def test_store_is_the_hosts_own_unless_the_engine_names_one() -> None:
    """`engines[].store`, else `store`, else none."""
    config = HeadstartConfig.model_validate(
        {"engines": [{"store": "far"}], "remote_stores": [{"id": "far", **REMOTE}]}
    )
    assert store_of(config, config.engines[0]) == "far"
    assert store_of(HeadstartConfig(), HeadstartConfig().engines[0]) == "store-0"
    assert store_of(HeadstartConfig(store=None), HeadstartConfig().engines[0]) is None

"""What of a configuration can change while the store runs, and what waits for its next start."""

from __future__ import annotations

from typing import Any

import pytest

from policies.config import StoreConfig
from prefix_store.reloading import FIXED, applicable

DISK = {"path": "/a", "capacity": "1GiB"}
REDIS = {"url": "redis://h:1/0"}


def store(**keys: Any) -> StoreConfig:
    return StoreConfig.model_validate(keys)


RELOADABLE = {
    "memory's eviction": {"memory": {"eviction": {"kind": "fifo"}}},
    "memory's admission": {"memory": {"admission": {"kind": "second_use"}}},
    "memory's pins": {"memory": {"pin_budget": "16MiB"}},
    "the disk's quota": {"disk": DISK | {"capacity": "2GiB"}},
    "when the disk is written": {"disk": DISK | {"write": "on_save"}},
    "the disk's eviction": {"disk": DISK | {"eviction": {"kind": "fifo"}}},
    "Redis's share": {"redis": REDIS | {"capacity": "1GiB"}},
    "loading": {"loading": {"kind": "never"}},
    "retention": {"retention": [{"priority": 9}]},
}
FIXED_KEYS = {
    "store.id": {"id": "other"},
    "store.socket": {"socket": "other.sock"},
    "store.events": {"events": "tcp://*:1"},
    "store.events_replay": {"events_replay": "tcp://*:2"},
    "store.lease": {"lease": "1m"},
    "store.memory.capacity": {"memory": {"capacity": "4GiB"}},
    "store.memory.verify": {"memory": {"verify": False}},
    "store.disk.path": {"disk": DISK | {"path": "/b"}},
    "store.disk.direct": {"disk": DISK | {"direct": True}},
    "store.redis.url": {"redis": {"url": "redis://other:1/0"}},
    "store.redis.timeout": {"redis": REDIS | {"timeout": "1s"}},
    "store.disk": {"disk": None},
    "store.redis": {"redis": None},
}
RUNNING: dict[str, Any] = {"disk": DISK, "redis": REDIS}


@pytest.mark.parametrize("name", RELOADABLE)
def test_policies_and_quotas_take_effect(name: str) -> None:
    """Nothing is left for a restart."""
    wanted = store(**RUNNING | RELOADABLE[name])
    assert applicable(store(**RUNNING), wanted) == (wanted, [])


@pytest.mark.parametrize("key", FIXED_KEYS)
def test_what_needs_a_restart_is_named_and_stays(key: str) -> None:
    """By its full name in the file."""
    running = store(**RUNNING)
    assert applicable(running, store(**RUNNING | FIXED_KEYS[key])) == (running, [key])


def test_every_fixed_key_exists_and_is_tried_here() -> None:
    """A renamed key would be reloaded by accident."""
    named = {
        f"store.{tier}.{key}" if tier else f"store.{key}" for tier in FIXED for key in FIXED[tier]
    }
    assert named <= FIXED_KEYS.keys()


def test_the_rest_of_a_tier_is_applied_beside_a_fixed_key() -> None:
    """One late key does not hold up the others."""
    wanted = store(memory={"capacity": "4GiB", "eviction": {"kind": "fifo"}})
    merged, late = applicable(store(), wanted)
    assert late == ["store.memory.capacity"]
    assert merged.memory.eviction.kind == "fifo"
    assert merged.memory.capacity == store().memory.capacity


@pytest.mark.parametrize("tier", ["disk", "redis"])
def test_a_tier_that_is_new_waits_for_the_start(tier: str) -> None:
    """It is not half there meanwhile."""
    merged, late = applicable(store(), store(**{tier: RUNNING[tier]}))
    assert late == [f"store.{tier}"]
    assert merged == store()

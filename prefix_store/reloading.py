"""Which parts of a store's configuration can change while it runs."""

from __future__ import annotations

from policies.base import Settings
from policies.config import StoreConfig

FIXED = {
    "": ("id", "socket", "events", "events_replay", "lease"),
    "memory": ("capacity", "verify"),
    "disk": ("path", "direct"),
    "redis": ("url", "timeout"),
}
"""By tier, the keys that take effect only at the start."""


def applicable(running: StoreConfig, wanted: StoreConfig) -> tuple[StoreConfig, list[str]]:
    """What can be applied of `wanted` to a store that runs with `running`, and the keys that
    differ and cannot."""
    late: list[str] = []
    update: dict[str, object] = {}
    for name in StoreConfig.model_fields:
        before, after = getattr(running, name), getattr(wanted, name)
        if before == after:
            continue
        if name in FIXED[""] or (name in FIXED and (before is None or after is None)):
            late.append(f"store.{name}")
        elif name in FIXED:
            update[name] = _merged(name, before, after, late)
        else:
            update[name] = after
    return running.model_copy(update=update), late


def _merged(tier: str, before: Settings, after: Settings, late: list[str]) -> Settings:
    kept = {key: getattr(before, key) for key in FIXED[tier]}
    late += [f"store.{tier}.{key}" for key, value in kept.items() if getattr(after, key) != value]
    return after.model_copy(update=kept)

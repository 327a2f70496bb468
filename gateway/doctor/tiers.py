"""The doctor's checks of the store's tiers below memory, and of its policies."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from gateway.doctor.finding import Finding, fail, ok, warn
from policies.config import StoreConfig
from prefix_store.protocol import PolicyStats, TierStats


def check_tiers(config: StoreConfig, tiers: list[TierStats]) -> Iterator[Finding]:
    """Each tier of the configuration is there and in use. `tiers`: as the store reports them."""
    reported = {tier.name: tier for tier in tiers}
    if config.disk is not None:
        advice = f"look at {config.disk.path} (store.disk.path): permissions, space, a failing disk"
        yield _check("disk", reported.get("disk"), advice)
    if config.redis is not None:
        place = _without_password(config.redis.url)
        advice = (
            f"is Redis at {place} (store.redis.url) up, its user allowed to read and write, "
            f"its memory full, or slower than store.redis.timeout "
            f"({config.redis.timeout * 1000:g} ms)?"
        )
        yield _check("redis", reported.get("redis"), advice)


def check_policies(policies: PolicyStats) -> Iterator[Finding]:
    """The newest configuration is in force; nothing is said where it is."""
    if policies.error:
        yield fail(
            "store policies",
            f"the changed configuration was refused, the old one stays: {policies.error}",
        )
    elif policies.needs_restart:
        keys = ", ".join(policies.needs_restart)
        yield warn("store policies", f"changed, but only for its next start: {keys}; restart it")


def _check(name: str, tier: TierStats | None, advice: str) -> Finding:
    check = f"store {name}"
    if tier is None:
        return fail(
            check, "the store runs without it; start `headstart store` anew with this configuration"
        )
    if tier.breaker == "open":
        return fail(check, f"left alone after {tier.faults:,} faults; {advice}")
    if tier.breaker == "half_open":
        return warn(check, f"being tried again after {tier.faults:,} faults; {advice}")
    used, size = tier.used_bytes / 2**30, tier.capacity_bytes / 2**30
    seen = f"{used:.2f} of {size:.2f} GiB used, {tier.blocks:,} blocks"
    if tier.faults:
        return warn(check, f"{seen}, but {tier.faults:,} faults since its start; {advice}")
    return ok(check, seen)


def _without_password(url: str) -> str:
    """Host and port, or the path of a socket: reports are shown around."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return host or parts.path

"""Makes a replica of an address."""

from __future__ import annotations

from ipaddress import IPv6Address, ip_address

from policies.engine import EngineConfig

MAX_ID_CHARS = 128
"""As EngineConfig.id."""


def replica_at(
    template: EngineConfig, address: str, port: int, *, name: str | None = None
) -> EngineConfig | None:
    """The replica at an address, with what the template says of all of them. Its id is `name` where
    that can be one, else the address. None for what is no address that others can reach: names, and
    addresses of one network interface (fe80::1%eth0)."""
    try:
        ip = ip_address(address)
    except ValueError:
        return None
    if isinstance(ip, IPv6Address) and ip.scope_id is not None:
        return None
    host = f"[{ip}]" if isinstance(ip, IPv6Address) else str(ip)
    place = f"{host}:{port}"
    usable = name is not None and 0 < len(name) <= MAX_ID_CHARS
    keys = {
        "id": name if usable else place,
        "url": f"http://{place}",
        "events": _filled(template.events, host),
        "events_replay": _filled(template.events_replay, host),
    }
    if template.events is not None:
        keys["events_bind"] = "engine"
    return template.model_copy(update=keys)


def to_launch(template: EngineConfig, port: int | str, name: str | None) -> EngineConfig:
    """The engine that a host of the fleet is to run: it listens where `replica_at` looks for it.
    A port that only has a name is that of the template."""
    keys = {
        "id": name or template.id,
        "events": _filled(template.events, "*"),
        "events_replay": _filled(template.events_replay, "*"),
    }
    if isinstance(port, int):
        keys["url"] = f"http://0.0.0.0:{port}"
    return template.model_copy(update=keys)


def _filled(endpoint: str | None, host: str) -> str | None:
    return None if endpoint is None else endpoint.replace("{ip}", host)

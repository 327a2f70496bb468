"""The part of the configuration that describes the fleet: how replicas are found and cared for."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator

from policies.base import Duration, Settings
from policies.engine import EngineConfig


class RemoteStoreConfig(Settings):
    """The store of another host: what it holds is known by its events."""

    id: str = Field(min_length=1)
    events: str
    """ZMQ endpoint on which it publishes (it binds)."""
    events_replay: str
    shares_redis: bool = False
    """Its Redis is that of our store: what one keeps there the others can load."""


class HealthConfig(Settings):
    """When a replica gets no requests, and when again."""

    interval: Duration = Field(default=1.0, gt=0.0, le=60.0)
    """Between two looks at /health and /metrics."""
    timeout: Duration = Field(default=3.0, gt=0.0, le=60.0)
    failures: int = Field(default=3, ge=1)
    """Looks, or requests, that failed one after another: then it is ejected."""
    successes: int = Field(default=1, ge=1)
    """Looks that succeeded one after another: then it is back."""
    ejection: Duration = Field(default=1.0, gt=0.0)
    """Shortest ejection; doubled each time that it is ejected again soon, up to a minute."""
    stall: Duration = Field(default=60.0, gt=0.0)
    """A replica that has requests and sends not a byte for so long is ejected."""
    slow_start: Duration = Field(default=20.0, ge=0.0)
    """A replica that is new, or back, gets to its full share of requests within this time."""


class CoalescingConfig(Settings):
    """Equal prefixes that nobody holds and that arrive together are computed once."""

    min_tokens: int = Field(default=256, ge=0)
    """Shorter ones are computed wherever they go."""
    max_wait: Duration = Field(default=2.0, ge=0.0, le=60.0)
    """How long the others wait for the first. 0: they do not wait."""


class ApproximateConfig(Settings):
    """What is believed of replicas without KV events: they hold what was sent to them."""

    expiry: Duration = Field(default=300.0, gt=0.0)
    max_tokens: int = Field(default=200_000, ge=1)
    """That one replica is believed to hold: the size of its KV memory."""


class StaticDiscovery(Settings):
    """The replicas are those in `engines`."""

    kind: Literal["static"] = "static"


class FileDiscovery(Settings):
    """A YAML file with a list like `engines`; read again when it changes."""

    kind: Literal["file"] = "file"
    path: str = Field(min_length=1)
    engine: EngineConfig = EngineConfig()
    """What holds for all of them, as far as an entry does not say otherwise. Its model is served
    from the start, with its block_size."""

    @field_validator("engine")
    @classmethod
    def _common_only(cls, value: EngineConfig) -> EngineConfig:
        return _without_place(value, "stand in the file")


class _AddressDiscovery(Settings):
    """What kinds have in common that find addresses."""

    engine: EngineConfig = EngineConfig()
    """What all of them have in common. In `events` and `events_replay`, {ip} is the address."""

    @field_validator("engine")
    @classmethod
    def _template(cls, value: EngineConfig) -> EngineConfig:
        _without_place(value, "come from the address")
        if not value.report_events:
            return value
        for key, port in (("events", 5557), ("events_replay", 5558)):
            endpoint = getattr(value, key)
            hint = f'write {key}: "tcp://{{ip}}:{port}" (vLLM then binds tcp://*:{port})'
            if endpoint is None:
                raise ValueError(
                    f"{key} is missing: {hint}; or report_events: false for engines without events"
                )
            if "{ip}" not in endpoint:
                raise ValueError(f"{key}: {endpoint!r} is the same place for all replicas: {hint}")
            if re.search(r"[{}]", endpoint.replace("{ip}", "")):
                raise ValueError(f"{key}: {endpoint!r}: only {{ip}} can be filled in")
        if value.events_bind == "gateway":
            raise ValueError("events_bind: must be engine: the gateway connects to each replica")
        return value


class DnsDiscovery(_AddressDiscovery):
    """A name that resolves to all replicas, such as a service without a virtual address."""

    kind: Literal["dns"] = "dns"
    name: str = Field(min_length=1)
    port: int = Field(default=8000, ge=1, le=65535)
    family: Literal["any", "ipv4", "ipv6"] = "any"
    """Of the addresses. Where each replica has one of both kinds, choose one of them: else each
    counts twice."""
    interval: Duration = Field(default=5.0, ge=0.1)
    """Between two look-ups, give or take a tenth."""
    timeout: Duration = Field(default=5.0, gt=0.0, le=60.0)
    """A look-up that takes longer counts as failed, and the replicas stay."""
    empty_after: Duration = Field(default=60.0, ge=0.0)
    """The answer that there are no addresses is believed when it was given for so long."""


class KubernetesDiscovery(_AddressDiscovery):
    """The ready pods behind Kubernetes services with a label."""

    kind: Literal["kubernetes"] = "kubernetes"
    namespace: str | None = None
    """Unset: the gateway's own."""
    selector: str = Field(min_length=1)
    """Label selector of the EndpointSlices, such as kubernetes.io/service-name=vllm."""
    port: int | str = 8000
    """Of the pods: a number, or the name of the port in the service."""
    server: str | None = None
    """URL of the API server. Unset: that of the cluster in which the gateway runs, with the token
    of its service account. Set: without a token, such as `kubectl proxy`."""

    @field_validator("port", mode="before")
    @classmethod
    def _number_or_name(cls, value: object) -> object:
        if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 65535:
            return value
        if isinstance(value, str) and re.match(r"^(?=.*[a-z])[a-z0-9-]{1,15}$", value):
            return value
        raise ValueError(f"{value!r} is neither a number up to 65535 nor the name of a port")

    @field_validator("namespace")
    @classmethod
    def _a_name(cls, value: str | None) -> str | None:
        if value is not None and not re.match(r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$", value):
            raise ValueError(f"{value!r} is not the name of a namespace")
        return value

    @field_validator("server")
    @classmethod
    def _http(cls, value: str | None) -> str | None:
        if value is not None and not re.match(r"^https?://[^/\s]+/?$", value):
            raise ValueError(f"{value!r} is not an http(s) URL, such as http://127.0.0.1:8001")
        return None if value is None else value.rstrip("/")


def _without_place(engine: EngineConfig, whence: str) -> EngineConfig:
    """What holds for many replicas says not where one of them is."""
    default = EngineConfig()
    if engine.id != default.id or engine.url != default.url:
        raise ValueError(f"id and url {whence}; remove them here")
    return engine


Discovery = Annotated[
    StaticDiscovery | FileDiscovery | DnsDiscovery | KubernetesDiscovery,
    Field(discriminator="kind"),
]


class FleetConfig(Settings):
    """How replicas are found, watched and shared."""

    discovery: Discovery = StaticDiscovery()
    health: HealthConfig = HealthConfig()
    coalescing: CoalescingConfig = CoalescingConfig()
    approximate: ApproximateConfig = ApproximateConfig()
    max_attempts: int = Field(default=3, ge=1, le=16)
    """Replicas that are tried for one request, as long as nothing was sent to its client."""
    max_replicas: int = Field(default=256, ge=1, le=4096)
    """Discovered or added ones beyond it are refused."""


class AdminConfig(Settings):
    """Who may change the fleet at run time (/admin/...)."""

    key_file: str | None = None
    """File with keys, one a line, for `authorization: Bearer`. Unset: only from this machine."""

"""The part of the configuration that describes the fleet: how replicas are found and cared for."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

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


class DnsDiscovery(Settings):
    """A name that resolves to all replicas, such as a service without a virtual address."""

    kind: Literal["dns"] = "dns"
    name: str = Field(min_length=1)
    port: int = Field(default=8000, ge=1, le=65535)
    interval: Duration = Field(default=5.0, ge=0.1)
    engine: EngineConfig = EngineConfig()
    """What all of them have in common. In `events` and `events_replay`, {ip} is the address."""


class KubernetesDiscovery(Settings):
    """The ready pods behind Kubernetes services with a label."""

    kind: Literal["kubernetes"] = "kubernetes"
    namespace: str = "default"
    selector: str = Field(min_length=1)
    """Label selector of the EndpointSlices, such as kubernetes.io/service-name=vllm."""
    port: int = Field(default=8000, ge=1, le=65535)
    engine: EngineConfig = EngineConfig()
    """As for dns."""


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

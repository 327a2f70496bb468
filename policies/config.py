"""The one YAML file: what may stand in it, what its defaults are."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from policies.admission import ADMIT_ALL, Admission
from policies.base import GIB, MIB, Duration, Settings, Size
from policies.engine import EngineConfig
from policies.eviction import Eviction, LruEviction
from policies.fleet import AdminConfig, FleetConfig, RemoteStoreConfig, StaticDiscovery
from policies.loading import FasterThanRecomputeLoading, Loading
from policies.retention import RetentionRule
from policies.routing import LeastTtftRouting, Routing


class ModelConfig(Settings):
    """The model that the engines serve."""

    name: str = "smollm2-135m-instruct"
    """The name that clients send as `model`."""
    path: str | None = None
    """Directory with weights, tokenizer and chat template. Unset: the demo model, fetched once."""
    max_model_len: int = Field(default=8192, ge=64)
    """Context length in tokens."""


class MemoryTierConfig(Settings):
    """The shared-memory arena."""

    capacity: Size = Field(default=Size(GIB), ge=MIB)
    eviction: Eviction = LruEviction()
    admission: Admission = ADMIT_ALL
    pin_budget: Size | None = None
    """What pins may hold. Unset: a quarter of the capacity."""
    verify: bool = True
    """Check the payload's checksum at every load (about as fast as the copy itself)."""

    @model_validator(mode="after")
    def _pins_fit(self) -> MemoryTierConfig:
        _check_pin_budget(self)
        return self


def pin_budget_of(tier: MemoryTierConfig | LowerTierConfig) -> int:
    """Bytes that pins may hold in a tier."""
    return int(tier.capacity) // 4 if tier.pin_budget is None else int(tier.pin_budget)


def _check_pin_budget(tier: MemoryTierConfig | LowerTierConfig) -> None:
    if tier.pin_budget is not None and tier.pin_budget > tier.capacity:
        raise ValueError("pin_budget is larger than capacity")


class LowerTierConfig(Settings):
    """What every tier below memory has."""

    capacity: Size = Field(ge=MIB)
    eviction: Eviction = LruEviction()
    admission: Admission = ADMIT_ALL
    pin_budget: Size | None = None
    """What pins may hold. Unset: a quarter of the capacity."""
    write: Literal["on_eviction", "on_save"] = "on_eviction"
    """When blocks are offered: as they go from the tier above, or as soon as they are saved."""

    @model_validator(mode="after")
    def _pins_fit(self) -> LowerTierConfig:
        _check_pin_budget(self)
        return self


class DiskTierConfig(LowerTierConfig):
    """Files in a directory of this host."""

    path: str = Field(min_length=1)
    """Made where it is missing; it must be empty or a store's."""
    capacity: Size = Field(default=Size(16 * GIB), ge=MIB)
    direct: bool = False
    """Write past the page cache (O_DIRECT): try it where memory is short or writes stall."""


class RedisTierConfig(LowerTierConfig):
    """A Redis or Valkey server, or a cluster, which several stores may share."""

    url: str = "redis://127.0.0.1:6379/0"
    """redis://, rediss:// (TLS), unix://, redis+cluster://, rediss+cluster://; user and password
    as in redis://user:password@host."""
    capacity: Size = Field(default=Size(4 * GIB), ge=MIB)
    """What this store may keep there; what other stores wrote can be read and is theirs."""
    timeout: Duration = Field(default=0.05, gt=0.0, le=10.0)
    """For a look-up; a transfer gets more, in proportion to its size."""

    @field_validator("url")
    @classmethod
    def _redis_url(cls, value: str) -> str:
        if not re.match(r"^(rediss?(\+cluster)?://[^/?]+(/\d*)?(\?.*)?|unix://.+)$", value):
            raise ValueError(
                "not a Redis URL, such as redis://127.0.0.1:6379/0, rediss://, unix:// or "
                "redis+cluster://; behind the host only the number of the database"
            )
        return value


class StoreConfig(Settings):
    """The store server of this host. Relative socket paths lie below the runtime directory."""

    id: str = "store-0"
    socket: str | None = None
    """Unix socket for control. Unset: store.sock in the runtime directory."""
    events: str | None = None
    """ZMQ endpoint on which the store publishes its events (it binds). Unset: ipc in the runtime
    directory."""
    events_replay: str | None = None
    memory: MemoryTierConfig = MemoryTierConfig()
    disk: DiskTierConfig | None = None
    redis: RedisTierConfig | None = None
    loading: Loading = FasterThanRecomputeLoading()
    """Whether blocks that lie below memory are loaded or computed."""
    retention: Annotated[tuple[RetentionRule, ...], Field(max_length=256)] = ()
    """How long whose blocks stay: the first matching rule that sets a key wins."""
    lease: Duration = Field(default=30.0, ge=5.0, le=600.0)
    """How long blocks that an engine is about to load are protected from eviction."""


class LimitsConfig(Settings):
    """What the gateway accepts."""

    max_body: Size = Field(default=Size(16 * MIB), ge=1024)
    body_memory: Size = Field(default=Size(256 * MIB), ge=1024)
    """Bodies that are being read or wait for a place, all together; more are answered with 429."""
    max_connections: int = Field(default=4096, ge=1)
    """Clients' connections, idle ones too; more are answered with 503 and closed."""
    max_concurrent_requests: int = Field(default=256, ge=1)
    """Requests that are with an engine at the same time."""
    max_waiting_requests: int = Field(default=256, ge=0)
    """Requests that may wait for a place; more are answered with 429 and `retry-after`."""
    max_wait: Duration = Field(default=30.0, ge=0.0)
    """A request that waited this long for a place is answered with 503 and `retry-after`."""
    header_timeout: Duration = Field(default=30.0, gt=0.0)
    """From the connection to the end of the request's headers and body."""
    idle_timeout: Duration = Field(default=75.0, gt=0.0)
    """Keep-alive connections without a request are closed after this time."""
    connect_timeout: Duration = Field(default=5.0, gt=0.0)
    upstream_idle_timeout: Duration = Field(default=600.0, gt=0.0)
    """Longest silence of an engine in the middle of an answer."""
    drain_timeout: Duration = Field(default=30.0, ge=0.0)
    """At shutdown, running answers get this long to end."""
    index_memory: Size = Field(default=Size(256 * MIB), ge=MIB)
    """Bound of the radix index."""
    memo_memory: Size = Field(default=Size(128 * MIB), ge=MIB)
    """Bound of the memo of rendered prefixes."""

    @model_validator(mode="after")
    def _bodies_fit(self) -> LimitsConfig:
        if self.body_memory < self.max_body:
            raise ValueError("body_memory must be at least max_body")
        return self


class RequestLogConfig(Settings):
    """A file of what was asked for, one line a request: hashes and lengths, no text. `headstart
    simulate` reads it."""

    path: str
    """A file of this gateway alone; older ones get .1, .2 ... at the end."""
    max_size: Size = Field(default=Size(64 * MIB), ge=MIB)
    """At most so much in one file."""
    keep: int = Field(default=4, ge=0, le=1000)
    """Older files."""


class TenantConfig(Settings):
    """Clients that share one cache. Others can neither use nor time its blocks."""

    key_file: str
    """File with this tenant's API keys, one a line."""
    weight: float = Field(default=1.0, gt=0.0, le=1000.0)
    """Its share of the engines while requests wait: 2 gets twice of what 1 gets."""


class HeadstartConfig(Settings):
    """Everything. Every key has a default, so an empty file is valid."""

    listen: str = "127.0.0.1:8080"
    model: ModelConfig = ModelConfig()
    engines: Annotated[tuple[EngineConfig, ...], Field(min_length=1)] = (EngineConfig(),)
    more_models: Annotated[tuple[ModelConfig, ...], Field(max_length=64)] = ()
    """Other models that engines of this fleet serve (`engines[].model`)."""
    store: StoreConfig | None = StoreConfig()
    """`store: null` runs without a store: only the engines' own caches are reused."""
    remote_stores: Annotated[tuple[RemoteStoreConfig, ...], Field(max_length=256)] = ()
    """Stores of other hosts whose replicas this gateway uses."""
    routing: Routing = LeastTtftRouting()
    """Which replica answers."""
    fleet: FleetConfig = FleetConfig()
    admin: AdminConfig = AdminConfig()
    limits: LimitsConfig = LimitsConfig()
    tenants: dict[str, TenantConfig] = Field(default_factory=dict)
    """Empty: no API key is asked for and everybody is the tenant `default`."""
    salt_secret_file: str | None = None
    """File with the secret from which tenants' salts are derived; the same for all gateways of a
    fleet. Unset: made once in the state directory."""
    request_log: RequestLogConfig | None = None
    """Unset: no such file is written."""
    runtime_dir: str | None = None
    """Sockets of this host. Unset: headstart-<uid> in the user's runtime or temporary directory."""

    @field_validator("listen")
    @classmethod
    def _host_port(cls, value: str) -> str:
        if not re.match(r"^\S+:\d{1,5}$", value) or int(value.rpartition(":")[2]) > 65535:
            raise ValueError(f"{value!r} is not HOST:PORT, such as 127.0.0.1:8080")
        return value

    @model_validator(mode="after")
    def _unique_ids(self) -> HeadstartConfig:
        ids = [engine.id for engine in self.engines]
        twice = sorted({i for i in ids if ids.count(i) > 1})
        if twice:
            raise ValueError(f"engines: the id {twice[0]!r} stands twice; ids must differ")
        names = [model.name for model in self.models]
        twice = sorted({n for n in names if names.count(n) > 1})
        if twice:
            raise ValueError(f"more_models: the name {twice[0]!r} stands twice; names must differ")
        for engine in self.engines:
            self._check_engine(engine, f"engines: {engine.id}")
        return self

    @model_validator(mode="after")
    def _engines_or_discovery(self) -> HeadstartConfig:
        discovery = self.fleet.discovery
        if isinstance(discovery, StaticDiscovery):
            return self
        if self.engines != (EngineConfig(),):
            raise ValueError(
                f"engines: not used with fleet.discovery.kind: {discovery.kind}; remove one of them"
            )
        self._check_engine(discovery.engine, "fleet.discovery.engine")
        return self

    def _check_engine(self, engine: EngineConfig, where: str) -> None:
        mistake = self.mistake_in(engine)
        if mistake is not None:
            raise ValueError(f"{where}: {mistake}")

    def mistake_in(self, engine: EngineConfig) -> str | None:
        """What an engine names that is not in this configuration; None: nothing."""
        models = sorted(model.name for model in self.models)
        if engine.model is not None and engine.model not in models:
            return f"the model {engine.model!r} is not among {models}"
        stores = [store.id for store in self.remote_stores]
        stores += [self.store.id] if self.store is not None else []
        if engine.store is not None and engine.store not in stores:
            return f"the store {engine.store!r} is not among {sorted(stores)}"
        return None

    @property
    def models(self) -> tuple[ModelConfig, ...]:
        """All models, the first one first."""
        return (self.model, *self.more_models)

    def model_of(self, engine: EngineConfig) -> ModelConfig:
        """The model that an engine serves."""
        return next((each for each in self.models if each.name == engine.model), self.model)

    @property
    def host(self) -> str:
        return self.listen.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        return int(self.listen.rpartition(":")[2])

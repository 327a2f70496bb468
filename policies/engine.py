"""The part of the configuration that describes one engine."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from policies.base import GIB, MIB, Settings, Size


class AdapterConfig(Settings):
    """A LoRA adapter that a replica serves under a name of its own. Equal weights are one adapter
    for the cache, whatever they are called where."""

    name: str = Field(min_length=1)
    """What clients send as `model`."""
    path: str | None = None
    """Directory with adapter_config.json and the weights, from which the digest is taken."""
    digest: str | None = Field(default=None, pattern="^[0-9a-f]{32}$")
    """Of the weights, as `headstart model digest DIR` prints it: for gateways that cannot read
    them."""

    @model_validator(mode="after")
    def _known_by_content(self) -> AdapterConfig:
        if (self.path is None) == (self.digest is None):
            raise ValueError("give either path or digest")
        return self


class EngineConfig(Settings):
    """One vLLM replica."""

    kind: Literal["vllm"] = "vllm"
    id: str = Field(default="engine-0", pattern=r"^[A-Za-z0-9._:\[\]-]{1,128}$")
    url: str = "http://127.0.0.1:8000"
    model: str | None = None
    """Name of the model it serves. Unset: the first one."""
    adapters: Annotated[tuple[AdapterConfig, ...], Field(max_length=256)] = ()
    """LoRA adapters that it serves."""
    store: str | None = None
    """Id of the store on its host: `store` or one of `remote_stores`. Unset: `store`."""
    max_running: int = Field(default=256, ge=1)
    """Requests that are with it at the same time; more wait here."""
    max_waiting: int = Field(default=256, ge=0)
    """Requests that may wait for it here; more go elsewhere, or are answered with 429."""
    report_events: bool = True
    """False for an engine that publishes no KV events: what it holds is guessed from what was sent
    to it."""
    events: str | None = None
    """ZMQ endpoint on which the engine publishes KV events. Unset: ipc in the runtime directory."""
    events_bind: Literal["auto", "engine", "gateway"] = "auto"
    """Who binds `events`; the other connects. `auto`: as vLLM does, the engine with `ipc://...` and
    `tcp://*:PORT`, the gateway with `tcp://HOST:PORT`. `engine`: for an engine on another host,
    which publishes on `tcp://*:PORT` and is reached at `tcp://HOST:PORT`."""
    events_replay: str | None = None
    """ZMQ endpoint of the engine's replay socket (the engine binds). Unset: ipc likewise."""
    block_size: int = Field(default=32, ge=1)
    """Tokens per KV block: multiples of 32 on CPUs, 16 is usual on CUDA."""
    kv_cache: Size = Field(default=Size(GIB), ge=64 * MIB)
    """KV memory of an engine that Headstart launches on a CPU (a GPU engine sizes its own)."""
    extra_args: tuple[str, ...] = ()
    """More arguments for vLLM, as they stand on its command line."""

    @property
    def publisher_binds(self) -> bool | None:
        """Whether the engine binds the endpoint of its events; None: as vLLM's rule says."""
        return None if self.events_bind == "auto" else self.events_bind == "engine"

    @field_validator("url")
    @classmethod
    def _http(cls, value: str) -> str:
        if not re.match(r"^https?://[^/]+", value):
            raise ValueError(f"{value!r} is not an http(s) URL, such as http://127.0.0.1:8000")
        return value.rstrip("/")

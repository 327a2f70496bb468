"""Is the process alive, can it answer, which models are there."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from engine_adapter.base import EngineAdapterError, EngineTimeoutError, EngineUnreachableError
from gateway.fleet.replica import Replica
from gateway.request.model_list import merged
from gateway.request.tenants import Tenants
from gateway.web.errors import upstream_body
from gateway.web.exchange import Exchange
from gateway.web.http_headers import for_client, for_engine

_MAX_MODELS_BYTES = 1024 * 1024
_MODELS_TIMEOUT_S = 5.0
"""An engine that hangs delays the list by no more."""


class Fleet(Protocol):
    """The replicas."""

    @property
    def replicas(self) -> Sequence[Replica]:
        """All that are there now."""


class Health:
    """Probes and the list of models."""

    def __init__(self, fleet: Fleet, tenants: Tenants, probe_timeout_s: float) -> None:
        self._fleet = fleet
        self._tenants = tenants
        self._probe_timeout_s = probe_timeout_s
        self.draining = False

    async def healthz(self, exchange: Exchange) -> None:
        """GET /healthz: 200 as long as the event loop turns."""
        await exchange.send(200, b'{"status":"ok"}')

    async def readyz(self, exchange: Exchange) -> None:
        """GET /readyz: 200 when an engine answers, 503 when none does or the gateway stops."""
        if self.draining:
            await exchange.send(503, b'{"status":"stopping"}')
            return
        replicas = self._fleet.replicas
        healthy = await asyncio.gather(
            *(replica.client.healthy(self._probe_timeout_s) for replica in replicas)
        )
        engines = {
            replica.id: "ok" if ok else "no answer"
            for replica, ok in zip(replicas, healthy, strict=True)
        }
        ready = any(healthy)
        body = {"status": "ok" if ready else "no engine answers", "engines": engines}
        await exchange.send(200 if ready else 503, msgspec.json.encode(body))

    async def models(self, exchange: Exchange) -> None:
        """GET /v1/models: every model that an engine lists, of the engines that answer. Where none
        lists models, the first one's refusal."""
        self._tenants.find(exchange.request.headers.get("Authorization"))
        headers = for_engine(exchange.request.headers, exchange.request_id)
        answers = await asyncio.gather(
            *(_models_of(replica, headers) for replica in self._fleet.replicas)
        )
        given = [answer for answer in answers if isinstance(answer, _Answer)]
        lists = [answer for answer in given if answer.status == 200]
        if lists:
            body = merged([answer.body for answer in lists])
            await exchange.send(200, body, headers=for_client(lists[0].headers))
        elif given:
            body = upstream_body(given[0].status, given[0].body)
            await exchange.send(given[0].status, body, headers=for_client(given[0].headers))
        else:
            failures = [answer for answer in answers if isinstance(answer, EngineAdapterError)]
            raise failures[0] if failures else EngineUnreachableError("there is no engine")


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes


async def _models_of(replica: Replica, headers: Mapping[str, str]) -> _Answer | EngineAdapterError:
    try:
        async with (
            asyncio.timeout(_MODELS_TIMEOUT_S),
            replica.client.request("GET", "/v1/models", headers=headers) as engine,
        ):
            body = await engine.read(_MAX_MODELS_BYTES)
            return _Answer(engine.status, engine.headers, body)
    except TimeoutError:
        return EngineTimeoutError(f"{replica.id} does not list its models")
    except EngineAdapterError as error:
        return error

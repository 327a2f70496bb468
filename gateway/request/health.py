"""Is the process alive, can it answer, which models are there."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from engine_adapter.base import EngineAdapterError, EngineTimeoutError, EngineUnreachableError
from gateway.fleet.choice import Replica
from gateway.request.tenants import Tenants
from gateway.web.errors import upstream_body
from gateway.web.exchange import Exchange
from gateway.web.http_headers import for_client, for_engine

_MAX_MODELS_BYTES = 1024 * 1024
_MODELS_TIMEOUT_S = 10.0


class Health:
    """Probes and the list of models."""

    def __init__(
        self, replicas: Sequence[Replica], tenants: Tenants, probe_timeout_s: float
    ) -> None:
        self._replicas = replicas
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
        healthy = await asyncio.gather(
            *(replica.client.healthy(self._probe_timeout_s) for replica in self._replicas)
        )
        engines = {
            replica.id: "ok" if ok else "no answer"
            for replica, ok in zip(self._replicas, healthy, strict=True)
        }
        ready = any(healthy)
        body = {"status": "ok" if ready else "no engine answers", "engines": engines}
        await exchange.send(200 if ready else 503, msgspec.json.encode(body))

    async def models(self, exchange: Exchange) -> None:
        """GET /v1/models: as the first engine that answers says."""
        self._tenants.find(exchange.request.headers.get("Authorization"))
        failure: EngineAdapterError = EngineUnreachableError("no engine is configured")
        for replica in self._replicas:
            try:
                await self._models_of(replica, exchange)
            except (EngineUnreachableError, EngineTimeoutError) as error:
                failure = error
            else:
                return
        raise failure

    async def _models_of(self, replica: Replica, exchange: Exchange) -> None:
        headers = for_engine(exchange.request.headers, exchange.request_id)
        try:
            async with (
                asyncio.timeout(_MODELS_TIMEOUT_S),
                replica.client.request("GET", "/v1/models", headers=headers) as engine,
            ):
                body = await engine.read(_MAX_MODELS_BYTES)
        except TimeoutError:
            raise EngineTimeoutError(f"{replica.id} does not list its models") from None
        if engine.status != 200:
            body = upstream_body(engine.status, body)
        await exchange.send(engine.status, body, headers=for_client(engine.headers))

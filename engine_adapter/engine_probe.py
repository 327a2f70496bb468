"""Asks an engine how it is."""

from __future__ import annotations

import asyncio
import json

from engine_adapter.base import EngineAdapterError, EngineLostError, EngineTimeoutError
from engine_adapter.engine_client import EngineClient
from engine_adapter.engine_gauges import EngineGauges

_MAX_HEALTH_BYTES = 64 * 1024
_MAX_METRICS_BYTES = 8 * 1024 * 1024


class EngineProbe:
    """The questions that a health check has. The client belongs to the caller."""

    def __init__(self, client: EngineClient, model: str) -> None:
        """`model`: a name that the engine serves."""
        self._client = client
        body = {"model": model, "prompt": "a", "max_tokens": 1, "temperature": 0.0}
        self._one_token = json.dumps(body).encode()

    async def health(self, timeout_s: float) -> int:
        """The status of GET /health; 200 means that the server runs and its engine has not died.

        Raises EngineUnreachableError, EngineTimeoutError, EngineLostError.
        """
        answer = await self._client.get("/health", timeout_s=timeout_s, max_bytes=_MAX_HEALTH_BYTES)
        return answer.status

    async def gauges(self, timeout_s: float) -> EngineGauges | None:
        """How busy it is; None where it does not say."""
        try:
            answer = await self._client.get(
                "/metrics", timeout_s=timeout_s, max_bytes=_MAX_METRICS_BYTES
            )
        except EngineAdapterError:
            return None
        return EngineGauges.parse(answer.body) if answer.status == 200 else None

    async def compute(self, timeout_s: float) -> None:
        """Have it compute one token: /health says nothing of an engine that hangs.

        A server that refuses such requests (4xx) is taken at its word: nothing can be learned then.
        Raises EngineUnreachableError, EngineTimeoutError, EngineLostError.
        """
        headers = {"Content-Type": "application/json"}
        request = self._client.request(
            "POST", "/v1/completions", headers=headers, body=self._one_token
        )
        try:
            async with asyncio.timeout(timeout_s), request as answer:
                await answer.read(_MAX_HEALTH_BYTES)
        except TimeoutError:
            raise EngineTimeoutError(f"no token within {timeout_s:g} s") from None
        if answer.status >= 500:
            raise EngineLostError(f"status {answer.status} instead of a token")

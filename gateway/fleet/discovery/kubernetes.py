"""Replicas that Kubernetes knows: the ready pods behind services with a label."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing

from gateway.fleet.discovery.cluster_api import ClusterAccess, ClusterApi, ClusterError, GoneError
from gateway.fleet.discovery.endpoint_slices import SliceTable
from gateway.fleet.discovery.known_replicas import KnownReplicas
from gateway.fleet.discovery.problem import Problem
from policies.engine import EngineConfig
from policies.fleet import KubernetesDiscovery as Settings

log = logging.getLogger(__name__)

Pause = Callable[[float], Awaitable[None]]

FIRST_RETRY_S = 1.0
MAX_RETRY_S = 30.0


class KubernetesDiscovery:
    """Lists and then watches, as API clients do; lists again when the watch breaks or what it
    watches on from is forgotten. The API server is believed at once, also that no pod is ready."""

    def __init__(
        self, settings: Settings, access: ClusterAccess, *, pause: Pause = asyncio.sleep
    ) -> None:
        self._settings = settings
        self._access = access
        self._pause = pause
        self._problem = Problem(f"the endpoints of {settings.selector}")
        self._retry_s = FIRST_RETRY_S

    @property
    def problem(self) -> str | None:
        """Why the API server does not tell."""
        return self._problem.reason

    async def lists(self) -> AsyncGenerator[Sequence[EngineConfig], None]:
        """As Discovery says."""
        known = KnownReplicas()
        while True:
            try:
                async with aclosing(self._states()) as states:
                    async for table in states:
                        engines = table.replicas(self._settings)
                        if known.learn(engines):
                            if not engines:
                                log.warning("%s: no pod is ready", self._settings.selector)
                            yield engines
            except GoneError:
                log.debug("what is watched was forgotten; listing again")
            except ClusterError as error:
                self._problem.report(str(error))
            await self._wait()
            self._retry_s = min(2 * self._retry_s, MAX_RETRY_S)

    async def _states(self) -> AsyncGenerator[SliceTable, None]:
        """The slices now and after each change. Ends with ClusterError."""
        async with ClusterApi(self._access, self._settings.selector) as api:
            table = SliceTable(await api.list())
            yield table
            while True:
                async with aclosing(api.watch(table.version)) as changes:
                    async for change in changes:
                        self._works()
                        table.apply(change)
                        yield table
                self._works()
                await self._wait()

    def _works(self) -> None:
        """Both list and watch do: whoever may not watch would be told so again and again."""
        self._problem.solve()
        self._retry_s = FIRST_RETRY_S

    async def _wait(self) -> None:
        await self._pause(self._retry_s * random.uniform(0.75, 1.25))

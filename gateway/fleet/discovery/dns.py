"""Replicas behind one name."""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

from gateway.fleet.discovery.known_replicas import KnownReplicas
from gateway.fleet.discovery.problem import Problem
from gateway.fleet.discovery.template import replica_at
from policies import fleet
from policies.engine import EngineConfig

log = logging.getLogger(__name__)

Resolve = Callable[[str], Awaitable[Sequence[str]]]
"""All addresses of a name. Raises OSError or UnicodeError, such as socket.gaierror."""
Pause = Callable[[float], Awaitable[None]]

JITTER = 0.1
"""So much sooner or later, as a share of the interval: gateways that were started together shall
not ask together."""

_FAMILIES = {
    "any": socket.AF_UNSPEC,
    "ipv4": socket.AF_INET,
    "ipv6": socket.AF_INET6,
}
_NO_ADDRESSES = {socket.EAI_NONAME, socket.EAI_NODATA, socket.EAI_ADDRFAMILY}
"""What getaddrinfo says when it was answered that there are none."""


class DnsDiscovery:
    """Asks again and again, however long the answer is said to hold.

    A look-up that fails changes nothing: replicas that are gone are noticed by health checks. The
    answer that there are no addresses is another thing, since a service without replicas looks so;
    but so do a resolver that has just started and a name that is being renewed. It is believed when
    nothing else was answered for `empty_after`.
    """

    def __init__(
        self,
        settings: fleet.DnsDiscovery,
        *,
        resolve: Resolve | None = None,
        pause: Pause = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock`: seconds, monotonic."""
        self._settings = settings
        self._resolve = resolve or _Resolver(_FAMILIES[settings.family])
        self._pause = pause
        self._clock = clock
        self._problem = Problem(f"the addresses of {settings.name}")

    @property
    def problem(self) -> str | None:
        """Why the addresses are not known."""
        return self._problem.reason

    async def lists(self) -> AsyncGenerator[Sequence[EngineConfig], None]:
        """As Discovery says."""
        known = KnownReplicas()
        lookup = _Lookup(self._resolve, self._settings.name)
        empty_since: float | None = None
        try:
            while True:
                engines = await self._look(lookup)
                if engines:
                    empty_since = None
                elif engines is not None:
                    empty_since = self._clock() if empty_since is None else empty_since
                    engines = self._believed(empty_since)
                if engines is not None and known.learn(engines):
                    if not engines:
                        log.warning("%s has no addresses: no replicas", self._settings.name)
                    yield engines
                interval_s = self._settings.interval
                await self._pause(interval_s * random.uniform(1 - JITTER, 1 + JITTER))
        finally:
            await lookup.close()

    async def _look(self, lookup: _Lookup) -> Sequence[EngineConfig] | None:
        """None: it failed."""
        settings = self._settings
        try:
            addresses = await lookup.addresses(settings.timeout)
        except TimeoutError:
            self._problem.report(f"no answer within {settings.timeout:g} s")
            return None
        except (OSError, UnicodeError) as error:
            self._problem.report(getattr(error, "strerror", None) or str(error))
            return None
        found = (replica_at(settings.engine, each, settings.port) for each in addresses)
        engines = {each.id: each for each in found if each is not None}
        if engines:
            self._problem.solve()
        return list(engines.values())

    def _believed(self, empty_since: float) -> Sequence[EngineConfig] | None:
        """What follows from the answer that there are no addresses."""
        empty_after_s = self._settings.empty_after
        if self._clock() - empty_since >= empty_after_s:
            self._problem.solve()
            return []
        self._problem.report(f"there are none, which is believed after {empty_after_s:g} s")
        return None


class _Lookup:
    """At most one at a time: one that takes too long is waited for again at the next look, so that
    a resolver that hangs does not hold more and more threads."""

    def __init__(self, resolve: Resolve, name: str) -> None:
        self._resolve = resolve
        self._name = name
        self._running: asyncio.Future[Sequence[str]] | None = None

    async def addresses(self, timeout_s: float) -> Sequence[str]:
        """Raises what the resolver raises, and TimeoutError."""
        if self._running is None:
            self._running = asyncio.ensure_future(self._resolve(self._name))
        await asyncio.wait({self._running}, timeout=timeout_s)
        if not self._running.done():
            raise TimeoutError
        ended, self._running = self._running, None
        return ended.result()

    async def close(self) -> None:
        """Let go of one that still runs."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)


class _Resolver:
    """The resolver of this host, with its hosts file and search domains."""

    def __init__(self, family: socket.AddressFamily) -> None:
        self._family = family

    async def __call__(self, name: str) -> Sequence[str]:
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(name, None, family=self._family, type=socket.SOCK_STREAM)
        except socket.gaierror as error:
            if error.errno in _NO_ADDRESSES:
                return []
            raise
        return [str(sockaddr[0]) for *_, sockaddr in found]

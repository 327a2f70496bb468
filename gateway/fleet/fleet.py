"""The replicas of a gateway: opened, watched, drained and closed here."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Protocol

from engine_adapter.engine_client import EngineClient
from engine_adapter.engine_gauges import EngineGauges
from engine_adapter.engine_probe import EngineProbe
from gateway.fleet.condition import Condition, Transition
from gateway.fleet.discovery.base import Discovery
from gateway.fleet.errors import ReplicaExistsError, UnknownReplicaError
from gateway.fleet.health_checks import HealthCheck
from gateway.fleet.holders import holders_of
from gateway.fleet.places import REPLICA_KEYS, Places
from gateway.fleet.replica import Replica
from gateway.fleet.replica_status import ReplicaStatus
from gateway.local.background import Background
from gateway.settings.user_error import UserError
from policies.config import HeadstartConfig
from policies.engine import EngineConfig
from policies.routing.replica_estimate import FleetPrior, ReplicaEstimate

log = logging.getLogger(__name__)

TEND_S = 0.25
"""Between two looks at slow starts and at what expires."""


class Names(Protocol):
    """Which replica serves what."""

    async def add_replica(self, engine: EngineConfig) -> None:
        """Raises UserError when its names contradict those of others."""

    def remove_replica(self, engine_id: str) -> None:
        """It is gone."""

    def serves(self, engine_id: str, name: str) -> bool:
        """Whether a request for `name` may go there."""


class Events(Protocol):
    """What replicas announce."""

    def add(self, engine: EngineConfig) -> None:
        """Follow its events from now on."""

    async def remove(self, engine_id: str) -> None:
        """Forget it and what it held."""

    def restarted(self, engine_id: str) -> None:
        """It is a new process, which holds nothing yet."""

    def has_room(self, engine_id: str, num_blocks: int) -> None:
        """It says how many blocks its memory has."""

    def tick(self, now: float) -> None:
        """Let go of what is too old; `now` of time.monotonic()."""


class Accounts(Protocol):
    """Who sums up per replica."""

    def add_replica(self, replica: str) -> None:
        """It may have requests from now on."""

    def remove_replica(self, replica: str) -> None:
        """It has none any more."""


class Fleet:
    """Its replicas change at run time. Everything happens on one event loop; `close` ends all."""

    def __init__(
        self,
        config: HeadstartConfig,
        names: Names,
        events: Events,
        accounts: Accounts,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._names = names
        self._events = events
        self._accounts = accounts
        self._clock = clock
        self._prior = FleetPrior()
        self._replicas: dict[str, Replica] = {}
        self._changing = asyncio.Lock()
        """Replicas are added and dropped one at a time: an id may come again at any moment."""
        self._wanted: dict[str, EngineConfig] = {}
        """By the last list that was applied."""
        self._leaving: dict[str, float] = {}
        """Replicas that are drained to be dropped, and when that is done at the latest."""
        self._background = Background()
        self._background.start("fleet", self._tend)

    async def close(self) -> None:
        """Drop all replicas and whatever runs for them."""
        await self._background.close()
        for engine_id in list(self._replicas):
            await self._drop(engine_id, "the gateway stops")

    @property
    def replicas(self) -> Sequence[Replica]:
        """All of them, the drained ones too."""
        return tuple(self._replicas.values())

    def serving(self, model: str) -> Sequence[Replica]:
        """Those that serve a model or adapter, whatever their condition."""
        return [each for each in self._replicas.values() if self._names.serves(each.id, model)]

    def snapshot(self) -> Sequence[ReplicaStatus]:
        """All of them, as people are told."""
        now, first = self._clock(), self._config.model.name
        return [
            ReplicaStatus.of(each, model=each.config.model or first, now=now)
            for each in self._replicas.values()
        ]

    async def add(self, engine: EngineConfig) -> None:
        """A replica from now on. Raises ReplicaExistsError; UserError when there are too many, or
        when what it serves contradicts the others."""
        async with self._changing:
            if engine.id in self._replicas:
                raise ReplicaExistsError(f"a replica with the id {engine.id!r} exists already")
            most = self._config.fleet.max_replicas
            if len(self._replicas) >= most:
                raise UserError(f"there are {most} replicas already (fleet.max_replicas)")
            await self._names.add_replica(engine)
            replica = self._open(engine)
            self._replicas[engine.id] = replica
            self._accounts.add_replica(engine.id)
            self._events.add(engine)
            self._background.start(f"health of {engine.id}", self._check_of(replica).run)
        log.info("replica %s at %s", engine.id, engine.url)

    async def remove(self, engine_id: str, *, force: bool = False) -> None:
        """Drain it, and drop it when its last answer has ended; `force`: at once. Answers that have
        not begun go elsewhere then. Raises UnknownReplicaError."""
        replica = self._find(engine_id)
        if force:
            await self._drop(engine_id, "removed")
            return
        replica.condition.drain()
        self._leaving[engine_id] = self._clock() + self._config.limits.drain_timeout

    def drain(self, engine_id: str) -> None:
        """No new requests for it. Raises UnknownReplicaError."""
        self._find(engine_id).condition.drain()

    def undrain(self, engine_id: str) -> None:
        """New requests again, also when it was to be removed. Raises UnknownReplicaError."""
        replica = self._find(engine_id)
        self._leaving.pop(engine_id, None)
        replica.condition.undrain()

    async def apply(self, engines: Sequence[EngineConfig]) -> None:
        """The fleet is this from now on: new replicas are added, missing ones drained and dropped,
        changed ones replaced when their answers have ended. Those that were added otherwise stay.
        What cannot be taken is logged and left out."""
        before, self._wanted = self._wanted, {engine.id: engine for engine in engines}
        for replica in self.replicas:
            if replica.id not in before and replica.id not in self._wanted:
                continue
            if self._wanted.get(replica.id) != replica.config:
                await self.remove(replica.id)
            elif replica.id in self._leaving:
                self.undrain(replica.id)
        await self._add_missing()

    async def _add_missing(self) -> None:
        for engine in list(self._wanted.values()):
            if engine.id not in self._replicas:
                try:
                    await self.add(engine)
                except UserError as error:
                    log.warning("replica %s is left out: %s", engine.id, error)

    async def follow(self, discovery: Discovery) -> None:
        """Be what is discovered, until cancelled."""
        async with aclosing(discovery.lists()) as lists:
            async for engines in lists:
                await self.apply(engines)

    def _find(self, engine_id: str) -> Replica:
        replica = self._replicas.get(engine_id)
        if replica is None:
            raise UnknownReplicaError(f"no replica has the id {engine_id!r}")
        return replica

    def _open(self, engine: EngineConfig) -> Replica:
        limits = self._config.limits
        condition = Condition(
            self._config.fleet.health,
            self._clock,
            others_settled=lambda: self._others_settled(engine.id),
            changed=lambda transition: self._changed(engine.id, transition),
        )
        return Replica(
            config=engine,
            client=EngineClient(
                engine.url,
                max_requests=engine.max_running,
                connect_timeout_s=limits.connect_timeout,
            ),
            holders=holders_of(self._config, engine),
            condition=condition,
            places=Places(
                engine.max_running,
                engine.max_waiting,
                limits.max_wait,
                name=f"replica {engine.id}",
                keys=REPLICA_KEYS,
            ),
            estimate=ReplicaEstimate(self._prior),
        )

    def _check_of(self, replica: Replica) -> HealthCheck:
        return HealthCheck(
            EngineProbe(replica.client, replica.config.model or self._config.model.name),
            replica.condition,
            replica.activity,
            _Watcher(replica, self._events, self._clock),
            self._config.fleet.health,
            clock=self._clock,
        )

    def _others_settled(self, engine_id: str) -> bool:
        return any(
            each.condition.settled for each in self._replicas.values() if each.id != engine_id
        )

    def _changed(self, engine_id: str, transition: Transition) -> None:
        replica = self._replicas.get(engine_id)
        if replica is None:
            return
        level = logging.INFO if replica.condition.accepts else logging.WARNING
        log.log(level, "replica %s is %s: %s", engine_id, transition.after.value, transition.reason)
        if not replica.condition.accepts:
            replica.places.evict_waiting()
        if replica.condition.is_lost:
            replica.losses.lose(transition.reason)
        self._share(replica)

    def _share(self, replica: Replica) -> None:
        alone = not any(
            each.condition.accepts for each in self._replicas.values() if each is not replica
        )
        share = 1.0 if alone else replica.condition.share(self._clock())
        limit = math.ceil(replica.config.max_running * share)
        if limit != replica.places.limit:
            replica.places.set_limit(limit)

    async def _tend(self) -> None:
        while True:
            for replica in self.replicas:
                self._share(replica)
            self._events.tick(self._clock())
            await self._let_go()
            await asyncio.sleep(TEND_S)

    async def _let_go(self) -> None:
        """Drop who is leaving and has no requests any more, or has had the time to end them."""
        for engine_id, ends in list(self._leaving.items()):
            replica = self._replicas.get(engine_id)
            if replica is None or not replica.places.running or self._clock() >= ends:
                await self._drop(engine_id, "removed")
                if engine_id in self._wanted:  # another one under the same id
                    await self._add_missing()

    async def _drop(self, engine_id: str, reason: str) -> None:
        async with self._changing:
            self._leaving.pop(engine_id, None)
            replica = self._replicas.pop(engine_id, None)
            if replica is None:
                return
            replica.places.evict_waiting()
            replica.losses.lose(reason)
            self._names.remove_replica(engine_id)
            self._accounts.remove_replica(engine_id)
            async with AsyncExitStack() as ending:  # whole also when the fleet closes just now
                ending.push_async_callback(replica.client.close)
                ending.push_async_callback(self._events.remove, engine_id)
                await self._background.stop(f"health of {engine_id}")
        log.info("replica %s: %s", engine_id, reason)


class _Watcher:
    """What a health check found out, to whom it concerns."""

    def __init__(self, replica: Replica, events: Events, clock: Callable[[], float]) -> None:
        self._replica = replica
        self._events = events
        self._clock = clock

    def polled(self, gauges: EngineGauges) -> None:
        if gauges.load is not None:
            self._replica.estimate.polled(gauges.load, self._clock())
        if gauges.kv_blocks is not None:
            self._events.has_room(self._replica.id, gauges.kv_blocks)

    def restarted(self) -> None:
        log.info("replica %s has restarted", self._replica.id)
        self._replica.estimate.restarted()
        self._events.restarted(self._replica.id)

"""The store server: one process per host that owns the arena, the catalogue and the policies.

Engines copy between device memory and the arena themselves; only metadata crosses the socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from policies.config import HeadstartConfig, StoreConfig
from prefix_store import protocol
from prefix_store.arena import Arena
from prefix_store.base import BlockHash, StoreProtocolError
from prefix_store.event_publisher import EventPublisher
from prefix_store.events import KVEvent
from prefix_store.hierarchy import Hierarchy
from prefix_store.lower_tier import LowerTier
from prefix_store.memory_tier import RESERVATION_S, MemoryTier
from prefix_store.pins import PinOwner
from prefix_store.reloading import applicable
from prefix_store.runtime_dir import RuntimePaths
from prefix_store.server_socket import listen, receive, send
from prefix_store.tier_setup import apply_policies, on_save_tiers, start_lower_tiers, tier_stats

logger = logging.getLogger(__name__)

MAX_CLIENTS = 256
SNAPSHOT_SLICE = 200
"""Blocks; a few milliseconds of work."""


@dataclass(slots=True)
class _LoadCounters:
    loads: int = 0
    failed: int = 0
    tokens: int = 0
    num_bytes: int = 0


class StoreServer:
    """Serves one arena until it is cancelled."""

    def __init__(self, config: HeadstartConfig, paths: RuntimePaths) -> None:
        store = config.store if config.store is not None else StoreConfig()
        self._store = store
        self._paths = paths
        self._socket_path = paths.store_socket(config)
        self._events_endpoint = paths.store_events(config)
        self._replay_endpoint = paths.store_replay(config)
        self._incarnation = time.time_ns()
        self._started = time.monotonic()
        self._loads = _LoadCounters()
        self._connectors: dict[int, str] = {}
        self._lower: list[LowerTier] = []
        self._policies = protocol.PolicyStats()
        self._clients: set[asyncio.Task[None]] = set()

    async def run(self, ready: Callable[[], None] | None = None) -> None:
        """Serve. `ready` is called once clients can connect. Raises SocketInUseError and
        ArenaMemoryError; ends by cancellation and leaves nothing behind."""
        self._paths.create()
        listener = listen(self._socket_path)
        arena = None
        publisher = None
        try:
            arena = await asyncio.to_thread(Arena.create, int(self._store.memory.capacity))
            publisher = EventPublisher(
                self._events_endpoint, self._replay_endpoint, snapshot=self._snapshot
            )
            self._arena = arena
            self._publisher = publisher
            self._tier = MemoryTier(
                self._store.memory, arena.view, self._store.lease, self._publish
            )
            self._lower = await start_lower_tiers(self._store, self._publish)
            self._tiers = Hierarchy(
                self._tier,
                arena.view,
                self._lower,
                loading=self._store.loading,
                retention=self._store.retention,
                on_save=on_save_tiers(self._store, self._lower),
                lookup_timeout_s=self._store.redis.timeout if self._store.redis else 0.05,
            )
            logger.info(
                "store %s: %.2f GiB of memory at %s",
                self._store.id, arena.num_bytes / 2**30, self._socket_path,
            )  # fmt: skip
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(publisher.run())
                tasks.create_task(self._expire())
                tasks.create_task(self._tiers.run())
                tasks.create_task(self._accept(listener))
                tasks.create_task(asyncio.to_thread(arena.populate))
                if ready is not None:
                    ready()
        finally:
            listener.close()
            self._socket_path.unlink(missing_ok=True)
            for client in self._clients:
                client.cancel()
            await asyncio.gather(*self._clients, return_exceptions=True)
            for tier in self._lower:
                await tier.close()
            if publisher is not None:
                publisher.close()
            if arena is not None:
                arena.close()

    async def reload(self, config: HeadstartConfig) -> None:
        """Apply another configuration without losing blocks: eviction, admission, loading,
        retention, pins and the quotas below memory. What can only change at a start is kept and
        named in the statistics."""
        merged, late = self._store, ["store"]
        if config.store is not None:
            merged, late = applicable(self._store, config.store)
        if merged.memory != self._store.memory:
            self._tier.apply(merged.memory, time.monotonic())
        self._tiers.loading, self._tiers.retention = merged.loading, merged.retention
        self._tiers.set_on_save(on_save_tiers(merged, self._lower))
        former, self._store = self._store, merged
        await apply_policies(former, merged, self._lower)
        self._policies = msgspec.structs.replace(
            self._policies, reloads=self._policies.reloads + 1, error="", needs_restart=late
        )
        logger.info("store %s: new policies are in force", merged.id)
        if late:
            logger.warning("start the store again for: %s", ", ".join(late))

    async def refuse_reload(self, reason: str) -> None:
        """The newest configuration cannot be used: the old one stays in force."""
        self._policies = msgspec.structs.replace(
            self._policies,
            error=reason[: protocol.MAX_REASON_CHARS],
            refused=self._policies.refused + 1,
        )
        logger.error("the configuration is not taken, the old one stays: %s", reason)

    async def _snapshot(self) -> list[KVEvent]:
        """In slices: engines wait for their answers only a moment."""
        nodes = self._tier.visible()
        result: list[KVEvent] = []
        for start in range(0, len(nodes), SNAPSHOT_SLICE):
            result += self._tier.events_of(nodes[start : start + SNAPSHOT_SLICE])
            await asyncio.sleep(0)
        for tier in self._lower:
            kept = tier.visible()
            for start in range(0, len(kept), SNAPSHOT_SLICE):
                result += tier.events_of(kept[start : start + SNAPSHOT_SLICE])
                await asyncio.sleep(0)
        return result

    def _publish(self, changes: list[KVEvent]) -> None:
        self._publisher.publish(changes)

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            self._tiers.expire()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            connection, _ = await loop.sock_accept(listener)
            connection.setblocking(False)
            if len(self._clients) >= MAX_CLIENTS:
                connection.close()
                continue
            task = loop.create_task(self._serve_client(connection))
            self._clients.add(task)
            task.add_done_callback(self._clients.discard)

    async def _serve_client(self, connection: socket.socket) -> None:
        client = "a client"
        try:
            hello = await receive(connection)
            client = await self._welcome(connection, hello)
            while (request := await receive(connection)) is not None:
                if isinstance(request, protocol.Serving):
                    self._connectors[id(connection)] = client
                    continue
                answer = await self._handle(request, client, writer=id(connection))
                if answer is not None:
                    await send(connection, answer)
        except StoreProtocolError as error:
            logger.warning("store: %s: %s", client, error)
            with contextlib.suppress(OSError):
                await send(connection, protocol.Refused(str(error)))
        except OSError as error:
            logger.info("store: %s is gone: %s", client, error)
        except Exception:
            logger.exception("store: a request of %s failed", client)
        finally:
            self._connectors.pop(id(connection), None)
            self._tier.abandon(id(connection), time.monotonic())
            connection.close()

    async def _welcome(self, connection: socket.socket, hello: protocol.Request | None) -> str:
        if not isinstance(hello, protocol.Hello):
            raise StoreProtocolError("the first message must be Hello")
        if hello.version != protocol.VERSION:
            raise StoreProtocolError(
                f"{hello.client} speaks version {hello.version} of the store's protocol, this "
                f"store speaks {protocol.VERSION}; install the same release on both sides"
            )
        welcome = protocol.Welcome(
            protocol.VERSION, self._store.id, self._incarnation, self._arena.num_bytes,
            self._store.lease, self._store.memory.verify,
        )  # fmt: skip
        # The first bytes on a fresh connection always fit into the socket's buffer.
        socket.send_fds(connection, [protocol.frame(welcome)], [self._arena.fd])
        return hello.client

    async def _handle(
        self, request: protocol.Request, client: str, writer: int
    ) -> protocol.Answer | None:
        answer = self._answer(request, client, writer)
        if answer is None:
            answer = await self._administer(request)
        if answer is None:
            self._hear(request, client)
        return answer

    def _hear(self, request: protocol.Request, client: str) -> None:
        """Of messages that have no answer."""
        match request:
            case protocol.Release():
                self._tiers.release(request.lease)
                self._count_load(request)
            case protocol.Commit():
                self._tiers.commit(request)
            case protocol.Cancel():
                self._tier.cancel(request.tickets)
            case protocol.Computed():
                self._tiers.computed(_engine_of(client), request)
            case protocol.Outcome():
                self._tiers.outcome(request)
            case protocol.Hello():
                raise StoreProtocolError("Hello was said before")

    async def _administer(self, request: protocol.Request) -> protocol.Answer | None:
        """Of what takes blocks out, or ends their protection."""
        match request:
            case protocol.Drop():
                await self._tiers.drop(BlockHash(request.block_hash))
            case protocol.ReloadRefused():
                await self.refuse_reload(request.reason)
            case protocol.Unpin():
                owner = PinOwner(request.tenant, request.session, request.prefix)
                return protocol.Cleared(self._tiers.unpin(owner))
            case protocol.Clear():
                return protocol.Cleared(await self._tiers.clear())
        return None

    def _answer(
        self, request: protocol.Request, client: str, writer: int
    ) -> protocol.Answer | None:
        """Of questions that are answered at once."""
        match request:
            case protocol.Match():
                return self._tiers.match(request, _engine_of(client))
            case protocol.Progress():
                return self._tiers.progress(request.lease)
            case protocol.Reserve():
                places = self._tiers.reserve(request, writer)
                return protocol.Reserved(
                    [protocol.Place(p.ticket, p.extent.offset) if p else None for p in places],
                    RESERVATION_S,
                )
            case protocol.GetPins():
                return self._pins(request)
            case protocol.GetStats():
                return self._stats()
        return None

    def _pins(self, asked: protocol.GetPins) -> protocol.Pins:
        now = time.monotonic()
        groups = self._tiers.pins(PinOwner(asked.tenant, asked.session, asked.prefix))
        return protocol.Pins(
            [
                protocol.Pin(
                    group.tier, group.owner.tenant, group.owner.session, group.owner.prefix,
                    group.num_blocks, group.num_bytes, group.ends_s - now,
                )
                for group in groups[: protocol.MAX_PINS]
            ],
            max(0, len(groups) - protocol.MAX_PINS),
        )  # fmt: skip

    def _count_load(self, request: protocol.Release) -> None:
        loaded = request.loaded
        if loaded is None:
            return
        self._loads.loads += 1
        self._loads.failed += not loaded.ok
        self._loads.tokens += loaded.num_tokens
        self._loads.num_bytes += loaded.num_bytes
        self._publisher.publish_loaded(loaded)

    def _stats(self) -> protocol.StoreStats:
        tier, counters = self._tier, self._tier.counters
        return protocol.StoreStats(
            store=self._store.id,
            incarnation=self._incarnation,
            uptime_s=time.monotonic() - self._started,
            capacity_bytes=tier.capacity_bytes,
            used_bytes=tier.used_bytes,
            reserved_bytes=tier.reserved_bytes,
            blocks=len(tier),
            leases=tier.num_leases,
            leased_blocks=tier.num_leased_blocks,
            connectors=sorted(set(self._connectors.values())),
            matches=counters.matches,
            blocks_asked=counters.blocks_asked,
            blocks_matched=counters.blocks_matched,
            blocks_stored=counters.blocks_stored,
            blocks_duplicate=counters.blocks_duplicate,
            blocks_orphaned=counters.blocks_orphaned,
            blocks_refused=counters.blocks_refused,
            evictions={reason.value: n for reason, n in counters.removals.items()},
            leases_expired=counters.leases_expired,
            reservations_expired=counters.reservations_expired,
            loads=self._loads.loads,
            loads_failed=self._loads.failed,
            tokens_loaded=self._loads.tokens,
            bytes_loaded=self._loads.num_bytes,
            tiers=[tier_stats(tier) for tier in self._lower],
            policies=self._policies,
        )


def _engine_of(client: str) -> str:
    """Connectors call themselves engine-0/scheduler and engine-0/worker."""
    return client.partition("/")[0]

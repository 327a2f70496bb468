"""What engines and stores announce: one event stream each, all into one residency index. Where a
replica's stream is missing or cut, what was sent to it takes its place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

from engine_adapter.event_subscriber import EventSockets, EventSubscriber
from engine_adapter.load_reports import LoadReports
from gateway.fleet.holders import store_of
from gateway.local.background import Background
from policies.config import HeadstartConfig
from policies.engine import EngineConfig
from policies.fleet import RemoteStoreConfig
from policies.routing.base import Evidence
from prefix_store.approximate import SentPrefixes
from prefix_store.base import BlockHash
from prefix_store.event_source import EventSource, RootOf
from prefix_store.residency import BLOCK_BYTES, LINK_BYTES, Holder, Medium, Residency
from prefix_store.runtime_dir import RuntimePaths


@dataclass(frozen=True, slots=True)
class Followed:
    """The event stream of one engine or store, and what it announced."""

    source: EventSource
    subscriber: EventSubscriber

    @property
    def is_exact(self) -> bool:
        """What is known here is what the publisher has, but for events on their way."""
        return self.subscriber.is_current and self.source.is_whole

    def progress(self) -> int | None:
        """Batches applied since the start; None while anything that it said may be lost here."""
        return self.subscriber.state().batches if self.is_exact else None


@dataclass(frozen=True, slots=True)
class _Engine:
    """What is known of what one engine holds."""

    events: Followed | None
    """None: it publishes none."""
    sent: SentPrefixes
    store: str | None
    """Id of the store that it loads from."""

    @property
    def is_exact(self) -> bool:
        """For its own memory."""
        return self.events is not None and self.events.is_exact


class FollowedEvents:
    """The streams of all engines and stores. `async with` runs them; engines come and go at any
    time. Everything happens on one event loop."""

    def __init__(
        self,
        config: HeadstartConfig,
        paths: RuntimePaths,
        *,
        block_size: int,
        residency: Residency,
        loads: LoadReports,
        root_of: Callable[[str], RootOf] | None = None,
        root_of_store: Callable[[str], RootOf] | None = None,
    ) -> None:
        """`block_size`: of the stores' blocks, in tokens. `root_of`: for the id of an engine, what
        the names of its adapters mean; unset, they mean the same everywhere. `root_of_store`: for
        the id of a store; unset, all its blocks are the first model's. Engines are to be added."""
        self._config = config
        self._paths = paths
        self._block_size = block_size
        self._residency = residency
        self._loads = loads
        self._root_of = root_of
        self._root_of_store = root_of_store
        self._background: Background | None = None
        self._sockets = EventSockets()
        self._engines: dict[str, _Engine] = {}
        self._cut: dict[str, float] = {}
        """Streams that are cut, by their source: since when, or when it was forgotten."""
        self.engines: dict[str, Followed] = {}
        """The engines that publish events. Changes as they come and go."""
        self.stores = {store.id: self._follow_remote(store) for store in config.remote_stores}
        """Ours too, where there is one."""
        self.store: Followed | None = None
        """Ours."""
        if config.store is not None:
            self.store = self.stores[config.store.id] = self._follow_store(
                config.store.id, paths.store_events(config), paths.store_replay(config)
            )

    async def __aenter__(self) -> FollowedEvents:
        self._background = Background()
        followed = self.engines | {f"store {name}": each for name, each in self.stores.items()}
        for name, each in followed.items():
            self._background.start(_task_of(name), each.subscriber.run)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._background is not None:
            await self._background.close()
        self._sockets.close()

    def add(self, engine: EngineConfig) -> None:
        """Follow an engine from now on. Its id must be new, or that of one that was removed."""
        assert engine.id not in self._engines, engine.id
        events = self._follow_engine(engine) if engine.report_events else None
        self._engines[engine.id] = _Engine(
            events, self._sent_to(engine), store_of(self._config, engine)
        )
        if events is not None:
            self.engines[engine.id] = events
            if self._background is not None:
                self._background.start(_task_of(engine.id), events.subscriber.run)

    async def remove(self, engine_id: str) -> None:
        """Forget an engine and all that it holds, at once; returns when its socket is closed.
        Unknown ones are ignored."""
        engine = self._engines.pop(engine_id, None)
        if engine is None:
            return
        self._cut.pop(engine_id, None)
        engine.sent.clear()
        if engine.events is not None:
            del self.engines[engine_id]
            engine.events.source.close()
            if self._background is not None:
                await self._background.stop(_task_of(engine_id))

    def restarted(self, engine_id: str) -> None:
        """An engine is a new process, which holds nothing yet."""
        engine = self._engines.get(engine_id)
        if engine is not None:
            engine.sent.clear()
            if engine.events is not None:
                engine.events.subscriber.new_incarnation()

    def has_room(self, engine_id: str, num_blocks: int) -> None:
        """An engine says how many blocks its memory has."""
        followed = self.engines.get(engine_id)
        if followed is not None:
            followed.source.has_room(num_blocks)

    def evidence(self, engine_id: str) -> Evidence:
        """How well it is known what an engine and the store on its host hold."""
        engine = self._engines.get(engine_id)
        if engine is None or not engine.is_exact:
            return Evidence.APPROXIMATE
        if engine.store is not None:
            store = self.stores.get(engine.store)
            if store is None or not store.is_exact:
                return Evidence.APPROXIMATE
        return Evidence.EXACT

    def answered(self, engine_id: str, hashes: Sequence[BlockHash], now: float) -> None:
        """An engine has computed this prompt: its first token is there. Noted where its events do
        not tell; `now` and later times are those of one monotonic clock."""
        engine = self._engines.get(engine_id)
        if engine is not None and hashes and not engine.is_exact:
            engine.sent.add(hashes, now)

    def learned(self, engine_id: str) -> int | None:
        """Blocks of an engine that were known only since a request had it report what it reuses;
        None where no such report can come. For ReportSampler."""
        engine = self._engines.get(engine_id)
        return None if engine is None or engine.events is None else engine.events.source.learned

    def tick(self, now: float) -> None:
        """To be called now and then. Forgets what was sent too long ago, what was sent while a
        stream was cut that is whole again, and what was told by streams that are cut for long."""
        for engine in self._engines.values():
            if engine.is_exact:
                engine.sent.clear()
            else:
                engine.sent.expire(now)
        for name, followed in (*self.engines.items(), *self.stores.items()):
            if followed.subscriber.is_connected:
                self._cut.pop(name, None)
            elif now - self._cut.setdefault(name, now) >= self._config.fleet.approximate.expiry:
                self._cut[name] = now
                followed.subscriber.forget()

    def _follow_engine(self, engine: EngineConfig) -> Followed:
        source = EventSource(
            engine.id,
            self._residency,
            model=engine.model or self._config.model.name,
            block_size=engine.block_size,
            max_blocks=self._max_blocks,
            root_of=None if self._root_of is None else self._root_of(engine.id),
        )
        events, replay = self._paths.engine_events(engine), self._paths.engine_replay(engine)
        subscriber = EventSubscriber(
            engine.id,
            events,
            replay,
            source,
            publisher_binds=engine.publisher_binds,
            sockets=self._sockets,
        )
        return Followed(source, subscriber)

    def _follow_remote(self, store: RemoteStoreConfig) -> Followed:
        return self._follow_store(store.id, store.events, store.events_replay)

    def _follow_store(self, store_id: str, events: str, replay: str) -> Followed:
        source = EventSource(
            store_id,
            self._residency,
            model=self._config.model.name,
            block_size=self._block_size,
            medium=Medium.MEMORY,
            max_blocks=self._max_blocks,
            root_of=None if self._root_of_store is None else self._root_of_store(store_id),
        )
        subscriber = EventSubscriber(
            store_id,
            events,
            replay,
            source,
            loads=self._loads.add,
            publisher_binds=True,
            sockets=self._sockets,
        )
        return Followed(source, subscriber)

    def _sent_to(self, engine: EngineConfig) -> SentPrefixes:
        approximate = self._config.fleet.approximate
        return SentPrefixes(
            self._residency,
            Holder(engine.id, Medium.DEVICE),
            expiry_s=approximate.expiry,
            max_blocks=max(1, approximate.max_tokens // engine.block_size),
        )

    @property
    def _max_blocks(self) -> int:
        """Of one source: as many as the whole index has room for."""
        return int(self._config.limits.index_memory) // (BLOCK_BYTES + LINK_BYTES)


def _task_of(name: str) -> str:
    return f"events of {name}"

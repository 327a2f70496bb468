"""What engines and store announce: one event stream each, all into one residency index."""

from __future__ import annotations

from dataclasses import dataclass

from engine_adapter.event_subscriber import EventSubscriber
from engine_adapter.load_reports import LoadReports
from gateway.background import Run
from policies.config import HeadstartConfig, StoreConfig
from prefix_store.event_source import EventSource
from prefix_store.residency import Medium, Residency
from prefix_store.runtime_dir import RuntimePaths


@dataclass(frozen=True, slots=True)
class Followed:
    """The event stream of one engine or store, and what it announced."""

    source: EventSource
    subscriber: EventSubscriber


class FollowedEvents:
    """The streams of all engines, and of the store where there is one."""

    def __init__(
        self,
        config: HeadstartConfig,
        paths: RuntimePaths,
        residency: Residency,
        loads: LoadReports,
        block_size: int,
    ) -> None:
        model = config.model.name
        self.engines: dict[str, Followed] = {}
        for engine in config.engines:
            source = EventSource(engine.id, residency, model=model, block_size=block_size)
            endpoint, replay = paths.engine_events(engine), paths.engine_replay(engine)
            subscriber = EventSubscriber(engine.id, endpoint, replay, source)
            self.engines[engine.id] = Followed(source, subscriber)
        self.store: Followed | None = None
        if config.store is not None:
            self.store = self._follow_store(
                config, config.store, paths, residency, loads, block_size
            )

    @staticmethod
    def _follow_store(
        config: HeadstartConfig,
        store: StoreConfig,
        paths: RuntimePaths,
        residency: Residency,
        loads: LoadReports,
        block_size: int,
    ) -> Followed:
        source = EventSource(
            store.id,
            residency,
            model=config.model.name,
            block_size=block_size,
            medium=Medium.MEMORY,
        )
        subscriber = EventSubscriber(
            store.id,
            paths.store_events(config),
            paths.store_replay(config),
            source,
            loads=loads.add,
            publisher_binds=True,
        )
        return Followed(source, subscriber)

    def runs(self) -> dict[str, Run]:
        """What has to run in the background, by name."""
        runs: dict[str, Run] = {
            f"events of {name}": each.subscriber.run for name, each in self.engines.items()
        }
        if self.store is not None:
            runs["events of the store"] = self.store.subscriber.run
        return runs

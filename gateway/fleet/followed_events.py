"""What engines and store announce: one event stream each, all into one residency index."""

from __future__ import annotations

from dataclasses import dataclass

from engine_adapter.event_subscriber import EventSubscriber
from engine_adapter.load_reports import LoadReports
from gateway.local.background import Run
from policies.config import HeadstartConfig
from prefix_store.event_source import EventSource
from prefix_store.residency import Medium, Residency
from prefix_store.runtime_dir import RuntimePaths


@dataclass(frozen=True, slots=True)
class Followed:
    """The event stream of one engine or store, and what it announced."""

    source: EventSource
    subscriber: EventSubscriber

    def progress(self) -> int | None:
        """Batches applied since the start; None while anything that it said may be lost here."""
        state, blocks = self.subscriber.state(), self.source.stats()
        if not state.connected or state.lacking or blocks.refused or blocks.overflow:
            return None
        return state.batches


class FollowedEvents:
    """The streams of all engines, and of the store where there is one."""

    def __init__(
        self,
        config: HeadstartConfig,
        paths: RuntimePaths,
        *,
        block_size: int,
        residency: Residency,
        loads: LoadReports,
    ) -> None:
        def source(name: str, medium: Medium) -> EventSource:
            return EventSource(
                name, residency, model=config.model.name, block_size=block_size, medium=medium
            )

        self.engines: dict[str, Followed] = {}
        for engine in config.engines:
            blocks = source(engine.id, Medium.DEVICE)
            endpoint, replay = paths.engine_events(engine), paths.engine_replay(engine)
            subscriber = EventSubscriber(engine.id, endpoint, replay, blocks)
            self.engines[engine.id] = Followed(blocks, subscriber)
        self.store: Followed | None = None
        if config.store is not None:
            blocks = source(config.store.id, Medium.MEMORY)
            endpoint, replay = paths.store_events(config), paths.store_replay(config)
            subscriber = EventSubscriber(
                config.store.id, endpoint, replay, blocks, loads=loads.add, publisher_binds=True
            )
            self.store = Followed(blocks, subscriber)

    def runs(self) -> dict[str, Run]:
        """What has to run in the background, by name."""
        runs: dict[str, Run] = {
            f"events of {name}": each.subscriber.run for name, each in self.engines.items()
        }
        if self.store is not None:
            runs["events of the store"] = self.store.subscriber.run
        return runs

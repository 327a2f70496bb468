"""One simulated engine (engine_adapter.simulated): replica, HTTP and events, and its restarts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

from engine_adapter.simulated.faults import Faults
from engine_adapter.simulated.options import SimulationOptions
from engine_adapter.simulated.replica import Replica
from engine_adapter.simulated.server import Listener, SimulatedServer
from engine_adapter.simulated.words import Words
from prefix_store.event_publisher import EventPublisher


class SimulatedEngine:
    """`run` is a task of its owner; `ready` is set while it listens."""

    def __init__(self, options: SimulationOptions, words: Words, *, host: str, port: int) -> None:
        """`words` may be shared by several engines and belongs to the caller."""
        self._options = options
        self._words = words
        self._host = host
        self._port = port
        self._away_s = 0.0
        self._over = asyncio.Event()
        self.ready = asyncio.Event()
        self.incarnations = 0

    @property
    def url(self) -> str:
        return f"http://{self._host}:{self._port}"

    async def run(self) -> None:
        """Serve until cancelled, one incarnation after the other. Raises OSError when the port is
        taken, EndpointInUseError when an endpoint of its events is."""
        while True:
            self._over.clear()
            await self._live()
            await asyncio.sleep(self._away_s)

    async def _live(self) -> None:
        options = self._options
        publisher = None
        if options.events is not None and options.replay is not None:
            publisher = EventPublisher(
                options.events, options.replay, snapshot=None, buffer_bytes=options.replay_bytes
            )
        replica = Replica(options, publisher)
        server = SimulatedServer(options, replica, self._words, Faults(replica, self._restart))
        listener = Listener(server)
        self.incarnations += 1
        try:
            await listener.start(self._host, self._port)
            async with asyncio.TaskGroup() as tasks:
                replays = tasks.create_task(publisher.run()) if publisher else None
                self.ready.set()
                await self._over.wait()
                if replays is not None:
                    replays.cancel()
        finally:
            self.ready.clear()
            replica.close()
            await listener.stop()
            if publisher is not None:
                publisher.close()

    def _restart(self, away_s: float) -> None:
        self._away_s = away_s
        self._over.set()


@contextlib.asynccontextmanager
async def running(engines: Sequence[SimulatedEngine]) -> AsyncIterator[None]:
    """Inside the block all of them listen. Raises what their `run` raises, in a group."""
    async with asyncio.TaskGroup() as tasks:
        served = [tasks.create_task(engine.run()) for engine in engines]
        for engine in engines:
            await engine.ready.wait()
        yield
        for task in served:
            task.cancel()

"""A store server in a thread of its own, on a socket in a temporary directory."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from policies.config import HeadstartConfig
from prefix_store.runtime_dir import RuntimePaths
from prefix_store.server import StoreServer


class StoreThread:
    """Starts in the constructor, ends with `stop`."""

    def __init__(self, root: Path, capacity: str = "1MiB") -> None:
        self.config = HeadstartConfig.model_validate(
            {"runtime_dir": str(root), "store": {"memory": {"capacity": capacity}, "lease": 5}}
        )
        self.paths = RuntimePaths.of(self.config)
        self.socket = self.paths.store_socket(self.config)
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        assert self._ready.wait(10)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        server = StoreServer(self.config, self.paths)
        self._task = asyncio.ensure_future(server.run(self._ready.set))
        await asyncio.wait([self._task])

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(10)


@pytest.fixture
def start_store(tmp_path: Path) -> Iterator[Callable[[], StoreThread]]:
    """Start a store (again) in the same runtime directory."""
    started: list[StoreThread] = []

    def start() -> StoreThread:
        started.append(StoreThread(tmp_path / "rt"))
        return started[-1]

    yield start
    for store in started:
        if store._thread.is_alive():
            store.stop()

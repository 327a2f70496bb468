"""A store server in a thread of its own, on a socket in a temporary directory."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from policies.config import HeadstartConfig
from prefix_store.runtime_dir import RuntimePaths
from prefix_store.server import StoreServer


class StoreThread:
    """Starts in the constructor, ends with `stop`."""

    def __init__(self, root: Path, **store: object) -> None:
        keys = {"memory": {"capacity": "1MiB"}, "lease": 5, **store}
        self.config = HeadstartConfig.model_validate({"runtime_dir": str(root), "store": keys})
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


class Stores:
    """Called with keys of `store`, starts one (again) in the same runtime directory."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._started: list[StoreThread] = []

    def __call__(self, **store: object) -> StoreThread:
        self._started.append(StoreThread(self._root, **store))
        return self._started[-1]

    def stop_all(self) -> None:
        for store in self._started:
            if store._thread.is_alive():
                store.stop()


@pytest.fixture
def start_store(tmp_path: Path) -> Iterator[Stores]:
    """Start a store (again) in the same runtime directory."""
    stores = Stores(tmp_path / "rt")
    yield stores
    stores.stop_all()

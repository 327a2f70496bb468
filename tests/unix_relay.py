"""A relay between two Unix sockets that can be cut and restored, as a network can."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from pathlib import Path

_CHUNK_BYTES = 64 * 1024


class UnixRelay:
    """Listens on `path` and connects to `target` for each connection; in a thread of its own."""

    def __init__(self, path: Path, target: Path) -> None:
        self._path = path
        self._target = target
        self._ready = threading.Event()
        self._relays: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        if not self._ready.wait(10):
            raise RuntimeError("the relay did not start")

    def cut(self) -> None:
        """Break all connections and refuse new ones."""
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(10)

    def restore(self) -> None:
        """Relay again."""
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(10)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(10)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        await self._listen()
        self._ready.set()
        await self._ended.wait()
        await self._close()

    async def _listen(self) -> None:
        self._server = await asyncio.start_unix_server(self._accept, str(self._path))

    async def _close(self) -> None:
        self._server.close()
        for relay in self._relays:
            relay.cancel()
        await asyncio.gather(*self._relays, return_exceptions=True)
        self._path.unlink(missing_ok=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._relays.add(task)
        try:
            with contextlib.suppress(OSError, asyncio.CancelledError):
                away, back = await asyncio.open_unix_connection(str(self._target))
                try:
                    await asyncio.wait(
                        [
                            asyncio.ensure_future(_pump(reader, back)),
                            asyncio.ensure_future(_pump(away, writer)),
                        ],
                        return_when=asyncio.FIRST_COMPLETED,
                    )
                finally:
                    back.close()
        finally:
            self._relays.discard(task)
            writer.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(_CHUNK_BYTES):
            writer.write(data)
            await writer.drain()

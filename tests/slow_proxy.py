"""A TCP proxy on loopback that is as slow as it is told to be, and ends TLS where asked."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading

CHUNK_BYTES = 16 * 1024


class SlowProxy:
    """In a thread of its own, so that it also serves code without an event loop. All connections
    share `bytes_per_s` in each direction; None: as fast as it gets. Set it at any time."""

    def __init__(
        self,
        target_port: int,
        bytes_per_s: float | None = None,
        delay_s: float = 0.0,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.bytes_per_s = bytes_per_s
        self.delay_s = delay_s
        """Added to each chunk."""
        self.port = 0
        self.num_bytes = 0
        """Relayed so far, in both directions."""
        self._target_port = target_port
        self._tls = tls
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        if not self._ready.wait(10):
            raise RuntimeError("the proxy did not start")

    @property
    def url(self) -> str:
        scheme = "rediss" if self._tls else "redis"
        return f"{scheme}://127.0.0.1:{self.port}/0"

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(10)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._free_at = {"up": 0.0, "down": 0.0}
        self._relays: set[asyncio.Task[None]] = set()
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0, ssl=self._tls)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._ended.wait()
        server.close()
        for relay in self._relays:
            relay.cancel()
        await asyncio.gather(*self._relays, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        relay = self._loop.create_task(self._relay(reader, writer))
        self._relays.add(relay)
        relay.add_done_callback(self._relays.discard)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
            try:
                pumps = [
                    self._loop.create_task(self._pump("up", reader, far_writer)),
                    self._loop.create_task(self._pump("down", far_reader, writer)),
                ]
                try:
                    await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for pump in pumps:
                        pump.cancel()
                    await asyncio.gather(*pumps, return_exceptions=True)
            finally:
                far_writer.close()
                writer.close()

    async def _pump(
        self, way: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while chunk := await reader.read(CHUNK_BYTES):
            if self.bytes_per_s is not None:
                now = self._loop.time()
                self._free_at[way] = max(self._free_at[way], now) + len(chunk) / self.bytes_per_s
                await asyncio.sleep(self._free_at[way] - now)
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            self.num_bytes += len(chunk)
            writer.write(chunk)
            await writer.drain()

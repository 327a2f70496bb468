"""The gateway's listening socket: limits of connections, and a stop that drains."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from aiohttp import web

from gateway.web.connection import Connection, TurnedAway
from gateway.web.errors import UnavailableError

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

_BACKLOG = 1024
_FORCED_STOP_S = 0.1
_SAY_AGAIN_S = 60.0


class _OneLine(logging.Filter):
    """What clients do wrong at the level of HTTP is one line in the log, not a traceback."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info:
            error = record.exc_info[1]
            record.msg = f"{record.getMessage()}: {type(error).__name__}"
            record.args = ()
            record.exc_info = None
            record.levelno, record.levelname = logging.WARNING, "WARNING"
        return True


def _logger() -> logging.Logger:
    logger = logging.getLogger("gateway.http")
    if not any(isinstance(f, _OneLine) for f in logger.filters):
        logger.addFilter(_OneLine())
    return logger


class Listener:
    """Serves a handler on one address. Start it and stop it on the event loop."""

    def __init__(
        self,
        handler: Handler,
        *,
        header_timeout_s: float,
        idle_timeout_s: float,
        max_connections: int,
    ) -> None:
        self._handler = handler
        self._max_connections = max_connections
        self._open: set[Connection] = set()
        self._said_full_at = float("-inf")
        self._header_timeout_s = header_timeout_s
        self._idle_timeout_s = idle_timeout_s
        # Leaving clients cancel their handler at once, which closes the way to the engine.
        self._http = web.Server(self._handle, handler_cancellation=True)
        self._logger = _logger()
        self._server: asyncio.Server | None = None
        self._greetings: dict[Connection, asyncio.TimerHandle] = {}
        """Connections that have not yet sent the head of their first request."""
        self._running: set[asyncio.Task[object]] = set()

    @property
    def running(self) -> int:
        """Requests that are being answered."""
        return len(self._running)

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port (port 0: any free one)."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._connection, host, port, backlog=_BACKLOG)
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    async def stop(self, drain_timeout_s: float) -> None:
        """Accept nothing more, give running answers time to end, then cancel them."""
        if self._server is not None:
            self._server.close()
        if self._running:
            await asyncio.wait(self._running, timeout=drain_timeout_s)
        left = list(self._running)
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left)
        await self._http.shutdown(_FORCED_STOP_S)
        for timer in self._greetings.values():
            timer.cancel()
        self._greetings.clear()

    def _connection(self) -> Connection | TurnedAway:
        if len(self._open) >= self._max_connections:
            return self._turned_away()
        connection = Connection(
            self._http,
            self._ended,
            keepalive_timeout_s=self._idle_timeout_s,
            logger=self._logger,
        )
        self._open.add(connection)
        self._greetings[connection] = asyncio.get_running_loop().call_later(
            self._header_timeout_s, self._too_slow, connection
        )
        return connection

    def _too_slow(self, connection: Connection) -> None:
        del self._greetings[connection]
        connection.force_close()

    def _ended(self, connection: Connection) -> None:
        self._open.discard(connection)
        self._greeted(connection)

    def _turned_away(self) -> TurnedAway:
        now = asyncio.get_running_loop().time()
        if now - self._said_full_at > _SAY_AGAIN_S:
            self._said_full_at = now
            self._logger.warning(
                "%d connections are open, more are turned away (limits.max_connections)",
                self._max_connections,
            )
        return TurnedAway(
            UnavailableError(
                f"{self._max_connections} connections are open (limits.max_connections)",
                retry_after_s=1,
            )
        )

    def _greeted(self, connection: Connection) -> None:
        timer = self._greetings.pop(connection, None)
        if timer is not None:
            timer.cancel()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        assert isinstance(request.protocol, Connection)
        self._greeted(request.protocol)
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            return await self._handler(request)
        finally:
            self._running.discard(task)

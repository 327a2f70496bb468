"""One client connection: told when it ends, and clear about what is not HTTP."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import cast

from aiohttp import web

from gateway.web.errors import BadRequestError, GatewayError, encode_error
from gateway.web.http_headers import REQUEST_ID, request_id_of


class TurnedAway(asyncio.Protocol):
    """A connection over the limit: answered at once, whatever it wants to ask."""

    def __init__(self, error: GatewayError) -> None:
        self._error = error

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        writer = cast(asyncio.WriteTransport, transport)  # uvloop's are no subclasses of it
        error = self._error
        body = encode_error(error)
        head = (
            f"HTTP/1.1 {error.status} Service Unavailable\r\n"
            f"{REQUEST_ID}: {request_id_of({})}\r\nServer: headstart\r\n"
            f"Retry-After: {error.retry_after_s or 1}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        writer.close()


class Connection(web.RequestHandler):
    """aiohttp's connection. `ended` is called once when it is lost."""

    __slots__ = ("_ended",)

    def __init__(
        self,
        server: web.Server,
        ended: Callable[[Connection], None],
        *,
        keepalive_timeout_s: float,
        logger: logging.Logger,
    ) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=keepalive_timeout_s,
            access_log=None,  # type: ignore[arg-type] # as web.Server's callers do
            logger=logger,
        )
        self._ended = ended

    def connection_lost(self, exc: BaseException | None) -> None:
        """Called by the event loop."""
        super().connection_lost(exc)
        self._ended(self)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to what never reached our handler, or broke it; then the connection ends."""
        error: GatewayError
        if status == BadRequestError.status:
            said = (message or "").strip().partition("\n")[0].rstrip(": ")[:200]
            error = BadRequestError(f"the request is not valid HTTP: {said or 'cannot be read'}")
            self.logger.info("%s: %s", request.remote, error)
        else:
            error = GatewayError("the gateway failed; its log says why")
            self.logger.error("%s: an answer failed", request.remote, exc_info=exc)
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun: nothing else can be said")
        response = web.Response(
            status=error.status,
            body=encode_error(error),
            content_type="application/json",
            headers={REQUEST_ID: request_id_of(request.headers), "Server": "headstart"},
        )
        response.force_close()
        return response

"""The routes of the gateway, and the one place where errors become answers."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from aiohttp import web

from engine_adapter.base import EngineAdapterError
from gateway.web.errors import (
    GatewayError,
    MethodNotAllowedError,
    NotFoundError,
    UnavailableError,
    from_engine_error,
)
from gateway.web.exchange import Exchange

log = logging.getLogger(__name__)

Handler = Callable[[Exchange], Awaitable[None]]

CLIENT_GONE = 499
"""A number that nginx made up, for answers that nobody waits for."""


@dataclass(frozen=True, slots=True)
class Route:
    """What answers a path. A route for GET answers HEAD too."""

    method: str
    handler: Handler
    while_draining: bool = False
    """Answered also when the gateway is stopping."""


class App:
    """Finds the route of a request and answers, also when that fails."""

    def __init__(self, routes: Mapping[str, Route]) -> None:
        self._routes = routes
        self.draining = False
        self.internal_errors = 0
        """Mistakes of ours that a client saw as status 500."""

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        """The handler for aiohttp's server."""
        exchange = Exchange(request, last=self.draining)
        try:
            await self._route(request)(exchange)
        except GatewayError as error:
            await exchange.send_error(error)
        except EngineAdapterError as error:
            await exchange.send_error(from_engine_error(error))
        except ConnectionError:
            log.debug("%s: the client has gone", exchange.request_id)
            if not exchange.started:
                return web.Response(status=CLIENT_GONE)  # nobody gets it
        except Exception:
            self.internal_errors += 1
            log.exception("%s %s: internal error", request.method, request.path)
            await exchange.send_error(GatewayError("the gateway failed; its log says why"))
        response = exchange.response()
        if self.draining:  # since this request came
            response.force_close()
        return response

    def _route(self, request: web.BaseRequest) -> Handler:
        route = self._routes.get(request.path)
        if route is None:
            raise NotFoundError(f"Invalid URL ({request.method} {request.path[:200]})")
        method = "GET" if request.method == "HEAD" else request.method
        if method != route.method:
            raise MethodNotAllowedError(
                f"{request.path} answers {route.method}, not {request.method[:20]}",
                allow=route.method,
            )
        if self.draining and not route.while_draining:
            raise UnavailableError("the gateway is stopping", retry_after_s=1)
        return route.handler

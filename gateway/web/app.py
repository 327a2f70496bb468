"""Answers every request: by its route, and where that fails with an error in the envelope."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from aiohttp import web

from engine_adapter.base import EngineAdapterError
from gateway.web.errors import (
    GatewayError,
    UnavailableError,
    from_engine_error,
)
from gateway.web.exchange import Exchange
from gateway.web.routes import Route, Routes

log = logging.getLogger(__name__)

CLIENT_GONE = 499
"""A number that nginx made up, for answers that nobody waits for."""


class App:
    """Finds the route of a request and answers, also when that fails."""

    def __init__(self, routes: Mapping[str, Route | tuple[Route, ...]]) -> None:
        """By path; see Routes."""
        self._routes = Routes(routes)
        self.draining = False
        self.internal_errors = 0
        """Mistakes of ours that a client saw as status 500."""

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        """The handler for aiohttp's server."""
        exchange = Exchange(request, last=self.draining)
        try:
            await self._answer(exchange)
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

    async def _answer(self, exchange: Exchange) -> None:
        found = self._routes.find(exchange)
        if self.draining and not found.route.while_draining:
            raise UnavailableError("the gateway is stopping", retry_after_s=1)
        exchange.path_parameters = found.parameters
        await found.route.handler(exchange)

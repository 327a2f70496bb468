"""The straight line of a completion request, from its body to its record."""

from __future__ import annotations

import itertools
import logging
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from engine_adapter.base import EngineAdapterError, Prompt, RenderingError
from gateway.accounts.record import Outcome
from gateway.fleet.assignment import Asked, Assignment
from gateway.fleet.dispatch import Dispatcher
from gateway.fleet.places import Places
from gateway.fleet.served_models import Served, ServedModels
from gateway.request.asking import deadline_of, priority_of, route_request, wants_explanation
from gateway.request.attempt import RETRIED_ONCE, Attempt, is_retryable
from gateway.request.body import Api, CompletionBody
from gateway.request.call import Call
from gateway.request.ended_calls import EndedCalls
from gateway.request.facts import facts_of
from gateway.request.relay import RelayOptions, relay
from gateway.request.tenants import Tenant, Tenants
from gateway.web.body_memory import BodyMemory, BodyShare
from gateway.web.errors import GatewayError, NotFoundError, from_engine_error
from gateway.web.exchange import Exchange
from gateway.web.http_headers import for_engine
from policies.config import LimitsConfig
from prefix_store.base import BlockHash

log = logging.getLogger(__name__)

_MAX_BYTES_PER_TOKEN = 64
"""A body with more bytes than this per token of context cannot be a prompt that fits: it is not
worth tokenizing, and the engine says so to the client."""

_BYTES_PER_TOKEN = 4
"""About, while a prompt is not tokenized yet."""

_MAX_ROOTS = 4096


class Renderer(Protocol):
    """Bodies to prompts, exactly as the engine does it."""

    async def chat(self, body: Mapping[str, Any], root: BlockHash) -> Prompt:
        """Raises RenderingError."""

    async def completion(self, body: Mapping[str, Any], root: BlockHash) -> Prompt:
        """Raises RenderingError."""


class Sampler(Protocol):
    """Which requests shall have their engine report all that it reuses."""

    def wants_full(self, engine_id: str) -> bool:
        """For the request that goes there now."""


@dataclass(frozen=True, slots=True)
class _Line:
    """A request on the straight line, once its body is known."""

    exchange: Exchange
    api: Api
    call: Call
    body: CompletionBody


class Proxy:
    """Answers completion requests. Its collaborators belong to the composition root."""

    def __init__(
        self,
        *,
        models: ServedModels,
        renderers: Mapping[str, Renderer],
        limits: LimitsConfig,
        max_attempts: int,
        tenants: Tenants,
        places: Places,
        body_memory: BodyMemory,
        dispatcher: Dispatcher,
        ended: EndedCalls,
        sampler: Sampler | None = None,
    ) -> None:
        """`renderers`: by base model; prompts of others are forwarded without prediction."""
        self._models = models
        self._renderers = renderers
        self._limits = limits
        self._max_attempts = max_attempts
        self._tenants = tenants
        self._places = places
        self._body_memory = body_memory
        self._dispatcher = dispatcher
        self._sampler = sampler
        self._ended = ended
        self._keys = map(str, itertools.count())
        self._roots: dict[tuple[Served, str], BlockHash] = {}

    async def chat(self, exchange: Exchange) -> None:
        """POST /v1/chat/completions."""
        await self._answer(exchange, Api.CHAT)

    async def completions(self, exchange: Exchange) -> None:
        """POST /v1/completions."""
        await self._answer(exchange, Api.COMPLETIONS)

    async def _answer(self, exchange: Exchange, api: Api) -> None:
        """However it ends, there is exactly one record, made when the answer is out."""
        call = Call(exchange.request_id)
        try:
            await self._straight_line(exchange, api, call)
        except GatewayError as error:
            call.ended(Outcome.REFUSED, error.status)
            await exchange.send_error(error)
        except EngineAdapterError as error:
            log.warning("%s: %s", call.request_id, error)
            await self._engine_failed(exchange, call, from_engine_error(error))
        finally:
            self._ended.add(call)

    async def _engine_failed(self, exchange: Exchange, call: Call, error: GatewayError) -> None:
        call.ended(Outcome.ENGINE_ERROR, call.status if exchange.started else error.status)
        await exchange.send_error(error)

    async def _straight_line(self, exchange: Exchange, api: Api, call: Call) -> None:
        """design.md, section 5."""
        headers = exchange.request.headers
        tenant = self._tenants.find(headers.get("Authorization"))
        call.tenant, call.salt = tenant.name, tenant.salt
        call.explain = wants_explanation(headers)
        with BodyShare(self._body_memory) as share:
            body, served = await self._read(exchange, api, call, share)
            ticket = tenant.ticket(
                priority_of(body), deadline_of(headers), cost=body.num_bytes / _BYTES_PER_TOKEN
            )
            async with self._places.place(ticket):
                share.give_back()  # running requests are bounded by their places
                call.prompt = await self._render(body, api, served, tenant)
                call.unrendered = call.prompt is None
                call.facts = facts_of(
                    body,
                    api,
                    headers,
                    tenant=tenant.name,
                    num_tokens=call.prompt.num_tokens if call.prompt else 0,
                )
                asked = Asked(
                    key=next(self._keys),
                    request_id=call.request_id,
                    model=served.name,
                    block_size=served.block_size,
                    prompt=call.prompt,
                    route=route_request(call.prompt, call.facts, served.block_size),
                    ticket=ticket,
                )
                await self._ask(_Line(exchange, api, call, body), asked)

    async def _read(
        self, exchange: Exchange, api: Api, call: Call, share: BodyShare
    ) -> tuple[CompletionBody, Served]:
        """The body, checked, and what its `model` means."""
        limits = self._limits
        raw = await exchange.read_body(limits.max_body, limits.header_timeout, share)
        call.body_complete()
        body = CompletionBody(raw, api)
        call.stream = body.stream
        served = self._models.find(body.model)
        if served is None:
            names = ", ".join(f"`{name}`" for name in self._models.names[:20])
            raise NotFoundError(
                f"The model `{body.model[:200]}` does not exist; this gateway serves {names}.",
                param="model",
                code="model_not_found",
            )
        call.model, call.block_size = body.model, served.block_size
        return body, served

    async def _ask(self, line: _Line, asked: Asked) -> None:
        """One replica after another, as long as nothing was sent to the client."""
        call = line.call
        call.match = self._dispatcher.see(asked)
        broken = 0
        for number in range(1, self._max_attempts + 1):
            async with self._dispatcher.place(asked) as assignment:
                may_retry = number < self._max_attempts and self._dispatcher.has_others(
                    asked, assignment
                )
                try:
                    await self._send(line, asked, assignment, may_retry)
                    return
                except EngineAdapterError as error:
                    given_up = line.exchange.started or not is_retryable(error, broken)
                    if given_up or not may_retry:
                        raise
                    broken += isinstance(error, RETRIED_ONCE)
                    self._dispatcher.failed(asked, assignment, type(error).__name__)
                    log.warning("%s: %s: %s", call.request_id, assignment.replica.id, error)

    async def _send(
        self, line: _Line, asked: Asked, assignment: Assignment, may_retry: bool
    ) -> None:
        call, body, replica = line.call, line.body, assignment.replica
        # Ours, not the client's id: clients may send one id twice. One for each attempt.
        call.assigned(assignment, uuid.uuid4().hex if replica.has_store else None)
        full = self._sampler is not None and self._sampler.wants_full(replica.id)
        sent = body.for_engine(call.salt, call.report_id, call.facts, full_report=full)
        headers = for_engine(line.exchange.request.headers, call.request_id)
        await relay(
            line.exchange,
            call,
            replica.client.request("POST", line.api.value, headers=headers, body=sent),
            Attempt(self._dispatcher, asked, assignment),
            RelayOptions(body.wants_usage, self._limits.upstream_idle_timeout, may_retry),
        )

    def _root(self, served: Served, tenant: Tenant) -> BlockHash:
        key = (served, tenant.name)
        root = self._roots.get(key)
        if root is None:
            if len(self._roots) >= _MAX_ROOTS:
                self._roots.clear()
            root = self._roots[key] = served.root(tenant.salt)
        return root

    async def _render(
        self, body: CompletionBody, api: Api, served: Served, tenant: Tenant
    ) -> Prompt | None:
        """Never fails the request: without a prompt there is no prediction, that is all."""
        renderer = self._renderers.get(served.model)
        if renderer is None or body.num_bytes > served.max_model_len * _MAX_BYTES_PER_TOKEN:
            return None
        root = self._root(served, tenant)
        try:
            if api is Api.CHAT:
                return await renderer.chat(body.fields, root)
            return await renderer.completion(body.fields, root)
        except RenderingError as error:
            log.debug("not rendered: %s", error)
        except Exception:
            # Templates run on what clients send: whatever they stumble over is for the engine to
            # judge, and shows in the stats as an unrendered prompt.
            log.exception("the renderer failed")
        return None

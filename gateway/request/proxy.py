"""The straight line of a completion request, from its body to its record."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from engine_adapter.base import EngineAdapterError, EngineUnreachableError, Prompt, RenderingError
from gateway.accounts.record import Outcome
from gateway.fleet.choice import Replica, ranked
from gateway.fleet.places import Places
from gateway.request.body import Api, CompletionBody
from gateway.request.call import Call
from gateway.request.ended_calls import EndedCalls
from gateway.request.facts import facts_of
from gateway.request.relay import relay
from gateway.request.tenants import Tenant, Tenants
from gateway.web.body_memory import BodyMemory, BodyShare
from gateway.web.errors import GatewayError, NotFoundError, from_engine_error
from gateway.web.exchange import Exchange
from gateway.web.http_headers import for_engine
from policies.config import LimitsConfig
from prefix_store.base import BlockHash
from prefix_store.hashing import routing_root
from prefix_store.residency import Match

log = logging.getLogger(__name__)

_MAX_BYTES_PER_TOKEN = 64
"""A body with more bytes than this per token of context cannot be a prompt that fits: it is not
worth tokenizing, and the engine says so to the client."""


class Renderer(Protocol):
    """Bodies to prompts, exactly as the engine does it."""

    async def chat(self, body: Mapping[str, Any], root: BlockHash) -> Prompt:
        """Raises RenderingError."""

    async def completion(self, body: Mapping[str, Any], root: BlockHash) -> Prompt:
        """Raises RenderingError."""


class Residency(Protocol):
    """Where blocks are."""

    def see(self, hashes: Sequence[BlockHash]) -> Match:
        """What every holder has of a prompt, whose blocks are now known to be asked for."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model that all replicas serve."""

    name: str
    max_model_len: int
    block_size: int


class Proxy:
    """Answers completion requests. Its collaborators belong to the composition root."""

    def __init__(
        self,
        *,
        model: ServedModel,
        limits: LimitsConfig,
        tenants: Tenants,
        places: Places,
        body_memory: BodyMemory,
        renderer: Renderer,
        residency: Residency,
        replicas: Sequence[Replica],
        ended: EndedCalls,
    ) -> None:
        self._model = model
        self._limits = limits
        self._tenants = tenants
        self._places = places
        self._body_memory = body_memory
        self._renderer = renderer
        self._residency = residency
        self._replicas = replicas
        self._ended = ended
        self._roots: dict[str, BlockHash] = {}

    async def chat(self, exchange: Exchange) -> None:
        """POST /v1/chat/completions."""
        await self._answer(exchange, Api.CHAT)

    async def completions(self, exchange: Exchange) -> None:
        """POST /v1/completions."""
        await self._answer(exchange, Api.COMPLETIONS)

    async def _answer(self, exchange: Exchange, api: Api) -> None:
        """However it ends, there is exactly one record, made when the answer is out."""
        call = Call(exchange.request_id, self._model.block_size)
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
        tenant = self._tenants.find(exchange.request.headers.get("Authorization"))
        call.tenant, call.salt = tenant.name, tenant.salt
        with BodyShare(self._body_memory) as share:
            body = await self._read(exchange, api, call, share)
            async with self._places:
                share.give_back()  # running requests are bounded by their places
                await self._locate(call, body, api, tenant)
                call.facts = facts_of(
                    body,
                    api,
                    exchange.request.headers,
                    tenant=tenant.name,
                    num_tokens=call.prompt.num_tokens if call.prompt else 0,
                )
                await self._send(exchange, api, call, body, tenant)

    async def _read(
        self, exchange: Exchange, api: Api, call: Call, share: BodyShare
    ) -> CompletionBody:
        """The body, checked."""
        limits = self._limits
        raw = await exchange.read_body(limits.max_body, limits.header_timeout, share)
        call.body_complete()
        body = CompletionBody(raw, api)
        call.stream = body.stream
        if body.model != self._model.name:
            raise NotFoundError(
                f"The model `{body.model[:200]}` does not exist; this gateway serves "
                f"`{self._model.name}`.",
                param="model",
                code="model_not_found",
            )
        call.model = body.model
        return body

    async def _send(
        self, exchange: Exchange, api: Api, call: Call, body: CompletionBody, tenant: Tenant
    ) -> None:
        """To the best replica, and to the next best where an engine cannot be reached: no answer
        can have begun there."""
        silence_s = self._limits.upstream_idle_timeout
        choices = ranked(self._replicas, call.match)
        for choice in choices:
            call.choice = choice
            # Ours, not the client's id: clients may send one id twice.
            call.report_id = uuid.uuid4().hex if choice.replica.has_store else None
            sent = body.for_engine(tenant.salt, call.report_id, call.facts)
            headers = for_engine(exchange.request.headers, call.request_id)
            request = choice.replica.client.request("POST", api.value, headers=headers, body=sent)
            try:
                await relay(exchange, call, request, body.wants_usage, silence_s)
                return
            except EngineUnreachableError as error:
                if choice is choices[-1]:
                    raise
                log.warning("%s: %s: %s", call.request_id, choice.replica.id, error)

    async def _locate(self, call: Call, body: CompletionBody, api: Api, tenant: Tenant) -> None:
        """Render the prompt and look up its blocks. Never fails the request: without a prompt
        there is no prediction, that is all."""
        prompt = await self._render(call, body, api, tenant)
        if prompt is None:
            call.unrendered = True
            return
        call.prompt = prompt
        call.match = self._residency.see(prompt.block_hashes)

    def _root(self, tenant: Tenant) -> BlockHash:
        if tenant.name not in self._roots:
            self._roots[tenant.name] = routing_root(self._model.name, tenant.salt)
        return self._roots[tenant.name]

    async def _render(
        self, call: Call, body: CompletionBody, api: Api, tenant: Tenant
    ) -> Prompt | None:
        if body.num_bytes > self._model.max_model_len * _MAX_BYTES_PER_TOKEN:
            return None
        root = self._root(tenant)
        try:
            if api is Api.CHAT:
                return await self._renderer.chat(body.fields, root)
            return await self._renderer.completion(body.fields, root)
        except RenderingError as error:
            log.debug("%s: not rendered: %s", call.request_id, error)
        except Exception:
            # Templates run on what clients send: whatever they stumble over is for the engine to
            # judge, and shows in the stats as an unrendered prompt.
            log.exception("%s: the renderer failed", call.request_id)
        return None

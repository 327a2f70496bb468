"""What of a request the routing goes by: its session, the start of its prompt, its deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from engine_adapter.base import Prompt
from gateway.request.body import CompletionBody
from gateway.web.errors import BadRequestError
from gateway.web.http_headers import DEADLINE_MS, EXPLAIN
from policies.routing.base import RouteRequest
from prefix_store.protocol import Facts

PREFIX_TOKENS = 256
"""Prompts whose first so many tokens are equal count as one prefix: enough to tell system prompts
apart."""

MAX_DEADLINE_MS = 86_400_000
_MAX_PRIORITY = 2**31


def route_request(prompt: Prompt | None, facts: Facts, block_size: int) -> RouteRequest:
    """What a routing policy may know."""
    prefix = b""
    if prompt is not None and prompt.block_hashes:
        last = min(len(prompt.block_hashes), max(1, PREFIX_TOKENS // block_size)) - 1
        prefix = prompt.block_hashes[last]
    return RouteRequest(
        num_tokens=prompt.num_tokens if prompt is not None else 0,
        session=f"{facts.tenant}\n{facts.session}" if facts.session else "",
        prefix=prefix,
    )


def wants_explanation(headers: Mapping[str, str]) -> bool:
    """Whether the client asked how its replica was chosen."""
    return headers.get(EXPLAIN, "0").strip() not in ("", "0", "false")


def deadline_of(headers: Mapping[str, str]) -> float | None:
    """When an engine must have begun, of the event loop's time. Raises BadRequestError."""
    text = headers.get(DEADLINE_MS)
    if text is None:
        return None
    if not text.strip().isdecimal() or not 0 < int(text) <= MAX_DEADLINE_MS:
        raise BadRequestError(
            f"the header {DEADLINE_MS} must be a whole number from 1 to {MAX_DEADLINE_MS}"
        )
    return asyncio.get_running_loop().time() + int(text) / 1000


def priority_of(body: CompletionBody) -> int:
    """Lower ones first, as in vLLM; what is no number is the engine's to refuse."""
    value = body.fields.get("priority")
    if isinstance(value, bool) or not isinstance(value, int):
        return 0
    return max(-_MAX_PRIORITY, min(value, _MAX_PRIORITY))

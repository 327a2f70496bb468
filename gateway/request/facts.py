"""What the gateway knows of a request that an engine does not: whose it is, of which session, which
turn. The store's policies go by it.

    session  header x-headstart-session, else header x-session-id, else `session_id` of the body,
             else `session_id` of its `metadata`, else `prompt_cache_key`
    prefix   header x-headstart-prefix, else `prompt_cache_key`
    turn     the assistant's messages in the body: answers that this conversation had before

These are the client's words and nobody checks them: they can make its own blocks stay longer or go
earlier, within what the retention rules give its tenant. A session is one tenant's: equal names of
two tenants are two sessions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.request.body import Api, CompletionBody
from gateway.web.errors import BadRequestError
from prefix_store.protocol import Facts

SESSION_HEADERS = ("x-headstart-session", "x-session-id")
PREFIX_HEADER = "x-headstart-prefix"
MAX_CHARS = 128
"""Of each text."""


def facts_of(
    body: CompletionBody,
    api: Api,
    headers: Mapping[str, str],
    *,
    tenant: str,
    num_tokens: int,
) -> Facts:
    """`num_tokens`: of the prompt, 0 where it is not known."""
    key = _text(_field(body, "prompt_cache_key"))
    return Facts(
        tenant=_text(tenant),
        model=_text(body.model),
        session=_session(body, headers) or key,
        prefix=_text(headers.get(PREFIX_HEADER)) or key,
        turn=_turn(body) if api is Api.CHAT else 0,
        num_tokens=num_tokens,
    )


def _session(body: CompletionBody, headers: Mapping[str, str]) -> str:
    for name in SESSION_HEADERS:
        if session := _text(headers.get(name)):
            return session
    if session := _text(_field(body, "session_id")):
        return session
    metadata = _field(body, "metadata")
    return _text(metadata.get("session_id")) if isinstance(metadata, dict) else ""


def _turn(body: CompletionBody) -> int:
    messages: list[dict[str, Any]] = body.fields["messages"]
    return sum(message.get("role") == "assistant" for message in messages)


def _field(body: CompletionBody, name: str) -> Any:
    """None where it cannot be read: these are the engine's to judge."""
    try:
        return body.fields.get(name)
    except BadRequestError:
        return None


def _text(value: object) -> str:
    """Cut to MAX_CHARS; empty for what is no text. Bytes of a header that are no UTF-8 become
    question marks."""
    if not isinstance(value, str):
        return ""
    return value.strip()[:MAX_CHARS].encode("utf-8", "replace").decode()

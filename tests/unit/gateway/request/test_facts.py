"""What is known of a request besides its tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.request.body import Api, CompletionBody
from gateway.request.facts import facts_of
from prefix_store.protocol import Facts


def facts_from(headers: dict[str, str] | None = None, api: Api = Api.CHAT, **fields: Any) -> Facts:
    body = {"model": "m", "messages": [], "prompt": "", **fields}
    checked = CompletionBody(json.dumps(body).encode(), api)
    return facts_of(checked, api, headers or {}, tenant="acme", num_tokens=7)


def test_a_plain_request_has_no_session() -> None:
    """Only what the gateway knows by itself."""
    assert facts_from() == Facts("acme", "m", "", "", 0, 7)


def test_the_session_is_what_is_named_most_plainly() -> None:
    """Headers before the body, our own header first, the cache key last."""
    headers = {"x-headstart-session": "ours", "x-session-id": "theirs"}
    fields: dict[str, Any] = {
        "session_id": "field",
        "metadata": {"session_id": "metadata"},
        "prompt_cache_key": "key",
    }
    found = []
    for name in (*headers, *fields, None):
        found.append(facts_from(headers, **fields).session)
        headers.pop(name or "", None)
        fields.pop(name or "", None)
    assert found == ["ours", "theirs", "field", "metadata", "key", ""]


def test_the_prefix_has_a_name_of_its_own() -> None:
    """The header, else the cache key, which also names the session where nothing else does."""
    both = facts_from({"x-headstart-prefix": "rules"}, prompt_cache_key="key")
    assert (both.prefix, both.session) == ("rules", "key")
    assert facts_from(prompt_cache_key="key", session_id="s").prefix == "key"


def test_turns_are_the_answers_before() -> None:
    """In chats; other prompts do not say."""
    roles = ["system", "user", "assistant", "tool", "assistant", "user"]
    messages = [{"role": role, "content": "x"} for role in roles]
    assert facts_from(messages=[*messages, {}]).turn == 2
    assert facts_from(api=Api.COMPLETIONS, messages=messages).turn == 0


@pytest.mark.parametrize("odd", [None, 7, ["s"], {"a": 1}, "", "  ", True])
def test_what_is_no_text_names_nothing(odd: Any) -> None:
    """And is passed on for the engine to judge."""
    facts = facts_from(session_id=odd, metadata=odd, prompt_cache_key=odd)
    assert (facts.session, facts.prefix) == ("", "")
    assert facts_from(metadata={"session_id": odd}).session == ""


def test_texts_are_cut_and_can_be_encoded() -> None:
    """Headers may hold bytes that are no text."""
    assert facts_from(session_id="x" * 1000).session == "x" * 128
    assert facts_from({"x-session-id": "a\udcffb"}).session == "a?b"


def test_a_field_that_cannot_be_read_names_nothing() -> None:
    """The engine answers such a body."""
    raw = b'{"model":"m","messages":[],"metadata":{"session_id":1e999}}'
    body = CompletionBody(raw, Api.CHAT)
    assert facts_of(body, Api.CHAT, {}, tenant="", num_tokens=0).session == ""

"""The messages of a request as the chat template sees them.

This follows vLLM 0.32 (vllm/renderers/chat_utils.py and hf.py, Apache-2.0) for text: what the
engine drops, joins, renames and reorders before it renders is done here in the same way. The
request body is never changed. What is not text or cannot be reproduced exactly is a RenderingError.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from engine_adapter.base import RenderingError
from engine_adapter.chat_template import Message
from engine_adapter.rendering_content_format import ContentFormat

_TEXT_KEYS = {"text": "text", "refusal": "refusal", "thinking": "thinking"}
"""Content part types that are text, and the key that holds it."""

_PART_FIELDS = frozenset(
    {"audio_embeds", "audio_url", "closed", "data", "file", "image_embeds", "image_pil",
     "image_url", "input_audio", "name", "prompt_cache_breakpoint", "refusal", "text", "thinking",
     "type", "uuid", "video_embeds", "video_url"}
)  # fmt: skip
"""Fields of content parts that the engine knows; only other ones reach the template."""

_BILLING_HEADER = "x-anthropic-billing-header"
"""The engine drops a line of a system message that starts so: it changes with every request."""


def conversation(
    messages: Sequence[Any], content_format: ContentFormat, *, knows_developer: bool
) -> list[Message]:
    """The template's messages for the `messages` of a request body."""
    converted = [_message(message, content_format) for message in messages]
    if not any(message["role"] == "developer" for message in converted):
        return converted
    if knows_developer:
        if any(message.get("tools") for message in converted):
            raise RenderingError("tools of a developer message cannot be rendered here")
        return converted
    return _one_system_message([_developer_as_system(message) for message in converted])


def _message(message: Any, content_format: ContentFormat) -> Message:
    if not isinstance(message, Mapping):
        raise RenderingError("each message must be an object")
    role = message.get("role")
    if not isinstance(role, str):
        raise RenderingError("each message needs a role")
    parts = _parts(message.get("content"))
    if role == "system":
        parts = _without_billing_header(parts)
    result: Message = {"role": role, "content": _content(parts, content_format)}
    if role == "assistant":
        _add_assistant_fields(result, message)
    elif role == "tool":
        _add_tool_fields(result, message)
    for field in ("name", "task"):
        if isinstance(message.get(field), str):
            result[field] = message[field]
    if role == "developer":
        result["tools"] = message.get("tools")
    return result


def _parts(content: Any) -> Iterable[Mapping[str, Any]]:
    if content is None:
        return ()
    if isinstance(content, str):
        return ({"type": "text", "text": content},)
    if not isinstance(content, list):
        raise RenderingError("message content must be a string or a list of parts")
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        key = _TEXT_KEYS.get(kind) if isinstance(kind, str) else None
        if key is None:
            raise RenderingError("only text content can be rendered here")
        if not isinstance(part.get(key), str) or part.get("uuid") is not None:
            raise RenderingError(f"a content part of type {kind} needs a text in {key}")
    return content


def _without_billing_header(parts: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    kept: list[Mapping[str, Any]] = []
    for part in parts:
        if part["type"] == "text" and part["text"].startswith(_BILLING_HEADER):
            rest = part["text"].partition("\n")[2]
            if rest:
                kept.append({**part, "text": rest})
        else:
            kept.append(part)
    return kept


def _content(parts: Iterable[Mapping[str, Any]], content_format: ContentFormat) -> Any:
    if content_format == "openai":
        return [
            {"type": "text", "text": part[_TEXT_KEYS[part["type"]]]}
            | {key: value for key, value in part.items() if key not in _PART_FIELDS}
            for part in parts
        ]
    return "\n".join(text for part in parts if (text := part[_TEXT_KEYS[part["type"]]]))


def _add_assistant_fields(result: Message, message: Mapping[str, Any]) -> None:
    calls = message.get("tool_calls")
    if calls is not None:
        if not isinstance(calls, list):
            raise RenderingError("tool_calls must be a list")
        if calls:
            result["tool_calls"] = [_tool_call(call) for call in calls]
    reasoning = message.get("reasoning")
    if reasoning is None:
        reasoning = message.get("reasoning_content")
    if reasoning is not None:
        if not isinstance(reasoning, str):
            raise RenderingError("reasoning must be a string")
        result["reasoning"] = result["reasoning_content"] = reasoning


def _add_tool_fields(result: Message, message: Mapping[str, Any]) -> None:
    if "tool_call_id" in message:
        result["tool_call_id"] = message["tool_call_id"]
    if isinstance(result["content"], list):
        result["content"] = "\n".join(part["text"] for part in result["content"])


def _tool_call(call: Any) -> dict[str, Any]:
    """A tool call with parsed arguments, its fields in the order that the engine gives them."""
    function = call.get("function") if isinstance(call, dict) else None
    if (
        not isinstance(function, dict)
        or call.get("type") != "function"
        or not isinstance(call.get("id"), str)
        or not isinstance(function.get("name"), str)
        or not isinstance(function.get("arguments"), str)
    ):
        raise RenderingError(
            'a tool call needs an id, type "function" and a function with name and arguments'
        )
    arguments = _arguments(function["arguments"])
    ordered = {"arguments": arguments, "name": function["name"]}
    return {
        "id": call["id"],
        "function": ordered | _rest(function, ordered),
        "type": "function",
    } | {key: value for key, value in call.items() if key not in ("id", "function", "type")}


def _rest(values: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in known}


def _arguments(text: str) -> dict[str, Any]:
    """Parsed arguments; {} for what is no JSON object, so that a conversation can go on."""
    try:
        parsed = json.loads(text) if text else {}
    except json.JSONDecodeError:
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _developer_as_system(message: Message) -> Message:
    if message["role"] != "developer":
        return message
    return {key: value for key, value in message.items() if key != "tools"} | {"role": "system"}


def _one_system_message(messages: list[Message]) -> list[Message]:
    """All system messages joined into one at the top, if one of them stands elsewhere."""
    at = [i for i, message in enumerate(messages) if message["role"] == "system"]
    if at in ([], [0]):
        return messages
    texts = (_text(messages[i]["content"]) for i in at)
    system: Message = {"role": "system", "content": "\n\n".join(text for text in texts if text)}
    return [system, *(message for message in messages if message["role"] != "system")]


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content)

"""Requests to a simulated engine (engine_adapter.simulated): what vLLM accepts and refuses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import msgspec

from engine_adapter.base import RenderingError
from engine_adapter.simulated.words import Words
from prefix_store.hashing import TokenIds

MAX_SALT_CHARS = 128
_NOT_IN_SALTS = frozenset("@/\\\0")
COMPLETION_TOKENS = 16
"""max_tokens of a completion that does not say."""
MOST_SEQUENCES = 64
"""Prompts times n of one request."""


class RefusedError(Exception):
    """vLLM's error envelope."""

    def __init__(
        self,
        message: str,
        *,
        kind: str = "BadRequestError",
        status: HTTPStatus = HTTPStatus.BAD_REQUEST,
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = {
            "error": {"message": message, "type": kind, "param": param, "code": status.value}
        }


@dataclass(frozen=True, slots=True)
class Served:
    """What the engine serves."""

    model: str
    adapters: tuple[str, ...]
    max_model_len: int

    def adapter(self, name: Any) -> str | None:
        """The adapter that a request's `model` names; None: the model itself."""
        if name is None or name == self.model:
            return None
        if name in self.adapters:
            return str(name)
        aliases = ", ".join((self.model, *self.adapters))
        raise RefusedError(
            f"The model `{name}` does not exist. Valid aliases: {aliases}.",
            kind="NotFoundError",
            status=HTTPStatus.NOT_FOUND,
            param="model",
        )

    def adapter_number(self, adapter: str | None) -> int | None:
        return None if adapter is None else self.adapters.index(adapter) + 1


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A checked request for one or several answers."""

    is_chat: bool
    model: str
    adapter: str | None
    prompts: list[TokenIds]
    copies: int
    """n."""
    max_tokens: int | None
    """None: until the answer ends by itself."""
    salt: str
    priority: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    returns_token_ids: bool
    reports_reused: bool


def decoded(raw: bytes) -> dict[str, Any]:
    """The body as an object. Raises RefusedError."""
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _invalid("json_invalid", "body", "JSON decode error", str(error)) from None
    if not isinstance(body, dict):
        raise _invalid("dict_type", "body", "Input should be a valid dictionary", repr(body)[:50])
    return body


async def read_chat(body: Mapping[str, Any], served: Served, words: Words) -> EngineRequest:
    """A /v1/chat/completions body. Raises RefusedError."""
    messages = body.get("messages")
    if messages is None:
        raise _invalid("missing", "body.messages", "Field required", "<dict>")
    if not isinstance(messages, list):
        raise _invalid("list_type", "body.messages", "Input should be a valid list", "<value>")
    adapter = served.adapter(body.get("model"))
    try:
        prompt = await words.chat(body)
    except RenderingError as error:
        raise RefusedError(str(error)) from None
    limit = body.get("max_completion_tokens")
    if limit is None:
        limit = body.get("max_tokens")
    return _checked(body, served, adapter, [prompt], limit, is_chat=True)


async def read_completion(body: Mapping[str, Any], served: Served, words: Words) -> EngineRequest:
    """A /v1/completions body. Raises RefusedError."""
    prompt = body.get("prompt")
    if prompt is None or prompt == "":
        raise RefusedError(
            "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)",
            param="prompt",
        )
    adapter = served.adapter(body.get("model"))
    several = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], str | list)
    try:
        prompts = [await words.completion(one) for one in (prompt if several else [prompt])]
    except RenderingError as error:
        raise RefusedError(str(error)) from None
    if not all(one.size for one in prompts):
        raise RefusedError("You must pass at least one prompt")
    limit = body.get("max_tokens")
    if limit is None:
        limit = COMPLETION_TOKENS
    return _checked(body, served, adapter, prompts, limit, is_chat=False)


def _checked(
    body: Mapping[str, Any],
    served: Served,
    adapter: str | None,
    prompts: list[TokenIds],
    limit: Any,
    *,
    is_chat: bool,
) -> EngineRequest:
    copies = _integer(body, "n") or 1
    if copies * len(prompts) > MOST_SEQUENCES:
        raise RefusedError(f"n times prompts must be at most {MOST_SEQUENCES}.", param="n")
    longest = max(prompt.size for prompt in prompts)
    options = body.get("stream_options") or {}
    xargs = body.get("vllm_xargs") or {}
    stream = bool(body.get("stream"))
    return EngineRequest(
        is_chat=is_chat,
        model=adapter or served.model,
        adapter=adapter,
        prompts=prompts,
        copies=copies,
        max_tokens=_max_tokens(limit, longest, served.max_model_len),
        salt=_salt(body),
        priority=_integer(body, "priority") or 0,
        stream=stream,
        include_usage=bool(options.get("include_usage")),
        continuous_usage=bool(options.get("continuous_usage_stats")),
        returns_token_ids=bool(body.get("return_token_ids")),
        reports_reused=xargs.get("kv_cache_report_mode") == "full",
    )


def _max_tokens(limit: Any, num_prompt: int, max_model_len: int) -> int | None:
    if num_prompt >= max_model_len:
        raise RefusedError(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt "
            f"contains {num_prompt} input tokens, which exceeds this limit even without any "
            "output tokens. Please reduce the length of the input prompt. "
            f"(parameter=input_tokens, value={num_prompt})",
            param="input_tokens",
        )
    if limit is None:
        return None
    if type(limit) is not int:
        raise _invalid("int_parsing", "body.max_tokens", "Input should be a valid integer", "?")
    if limit < 1:
        raise RefusedError(
            f"max_tokens must be at least 1, got {limit}. (parameter=max_tokens, value={limit})",
            param="max_tokens",
        )
    return min(limit, max_model_len - num_prompt)


def _salt(body: Mapping[str, Any]) -> str:
    salt = body.get("cache_salt")
    if salt is None:
        return ""
    if not isinstance(salt, str) or not salt:
        raise RefusedError(
            "Parameter 'cache_salt' must be a non-empty string if provided. (parameter=cache_salt)",
            param="cache_salt",
        )
    if len(salt) > MAX_SALT_CHARS or _NOT_IN_SALTS & set(salt):
        raise RefusedError(
            f"Parameter 'cache_salt' must be at most {MAX_SALT_CHARS} characters and must not "
            "contain '@', '/', '\\\\', or NUL. (parameter=cache_salt)",
            param="cache_salt",
        )
    return salt


def _integer(body: Mapping[str, Any], field: str) -> int | None:
    value = body.get(field)
    if value is not None and type(value) is not int:
        raise _invalid("int_type", f"body.{field}", "Input should be a valid integer", "?")
    return value


def _invalid(kind: str, place: str, message: str, given: str) -> RefusedError:
    detail = {"type": kind, "loc": place, "msg": message, "input": given}
    return RefusedError(f"1 validation error:\n  {detail}", kind="Bad Request", param=place)

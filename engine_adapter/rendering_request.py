"""From request bodies to the input of a chat template or to plain text.

Which fields of a body reach the prompt, and how, follows vLLM 0.32 (the protocol modules of its
chat and completion endpoints, vllm/renderers/params.py, Apache-2.0) with the server's default
flags.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine_adapter.base import RenderingError
from engine_adapter.chat_template import ChatInput, ChatTemplate
from engine_adapter.rendering_messages import conversation

_TEMPLATE_ARGUMENTS = frozenset(
    {"chat_template", "tokenize", "messages", "tools", "conversation", "self", "max_length",
     "padding", "truncation", "return_tensors", "return_dict", "return_assistant_tokens_mask",
     "tokenizer_kwargs", "model_config", "tokenizer"}
)  # fmt: skip
"""Names that mean something else than a template variable when chat_template_kwargs has them."""


def tools_of(body: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The tools as the template sees them; tool_choice does not matter, not even "none"."""
    tools = body.get("tools")
    if tools is None:
        return None
    if not isinstance(tools, list) or not tools:
        raise RenderingError("tools must be a list that is not empty")
    return [_tool(tool) for tool in tools]


def _tool(tool: Any) -> dict[str, Any]:
    """A tool as the engine's model of it dumps: known fields in a fixed order."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if (
        not isinstance(function, dict)
        or tool.get("type", "function") != "function"
        or not isinstance(function.get("name"), str)
    ):
        raise RenderingError('each tool needs type "function" and a function with a name')
    description, parameters = function.get("description"), function.get("parameters")
    if not isinstance(description, str | None) or not isinstance(parameters, dict | None):
        raise RenderingError("a tool's description must be a string, its parameters an object")
    dumped: dict[str, Any] = {
        "name": function["name"],
        "description": description,
        "parameters": parameters,
    }
    strict, deferred = function.get("strict"), tool.get("defer_loading")
    own_deferred = function.get("defer_loading", deferred)
    if own_deferred is None:
        own_deferred = deferred
    for field, value in (("strict", strict), ("defer_loading", own_deferred)):
        if value is not None:
            dumped[field] = _flag(value, field)
    result: dict[str, Any] = {"type": "function", "function": dumped}
    if deferred is not None:
        result["defer_loading"] = _flag(deferred, "defer_loading")
    return result


def chat_input(
    body: Mapping[str, Any], template: ChatTemplate, tools: list[dict[str, Any]] | None
) -> ChatInput:
    """What the template renders for a /v1/chat/completions body. Raises RenderingError."""
    _refuse(body, "chat_template", "truncate_prompt_tokens")
    transfer = body.get("kv_transfer_params")
    if isinstance(transfer, dict) and transfer.get("prompt_token_ids") is not None:
        raise RenderingError("the request brings its own prompt tokens")
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise RenderingError("messages must be a list")
    variables = _variables(body)
    documents = body.get("documents")
    if documents is None:
        documents = variables.get("documents")
    return ChatInput(
        messages=conversation(
            messages, template.content_format, knows_developer=template.knows_developer
        ),
        tools=tools,
        documents=_documents(documents),
        add_generation_prompt=_flag(
            body.get("add_generation_prompt", True), "add_generation_prompt"
        ),
        continue_final_message=_flag(
            body.get("continue_final_message", False), "continue_final_message"
        ),
        variables={k: v for k, v in variables.items() if k in template.variables} or None,
    )


def _variables(body: Mapping[str, Any]) -> dict[str, Any]:
    given = body.get("chat_template_kwargs")
    if given is None:
        given = {}
    if not isinstance(given, dict):
        raise RenderingError("chat_template_kwargs must be an object")
    if unusable := _TEMPLATE_ARGUMENTS & given.keys():
        raise RenderingError(f"chat_template_kwargs cannot set {min(unusable)} here")
    # The engine takes null and "auto" for "not set".
    variables = {k: v for k, v in given.items() if v is not None and v != "auto"}
    for field in ("add_generation_prompt", "continue_final_message"):
        variables.pop(field, None)  # fields of the request itself, which win even by their default
    if (effort := body.get("reasoning_effort")) is not None:
        if not isinstance(effort, str):
            raise RenderingError("reasoning_effort must be a string")
        variables["reasoning_effort"] = effort
        if "enable_thinking" not in given:
            variables["enable_thinking"] = effort != "none"
    return variables


def _documents(documents: Any) -> list[dict[str, Any]] | None:
    if documents is None:
        return None
    if not isinstance(documents, list) or not all(isinstance(d, dict) for d in documents):
        raise RenderingError("documents must be a list of objects")
    return documents


def adds_special_tokens(body: Mapping[str, Any], *, default: bool) -> bool:
    """Whether the tokenizer adds its special tokens (such as BOS) to the rendered text."""
    return _flag(body.get("add_special_tokens", default), "add_special_tokens")


def completion_prompt(body: Mapping[str, Any]) -> str | list[int]:
    """The one prompt of a /v1/completions body: text or token ids. Raises RenderingError."""
    _refuse(body, "truncate_prompt_tokens", "suffix", "prompt_embeds")
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list) or not prompt:
        raise RenderingError("prompt must be a string or a list of token ids")
    if any(type(token) is not int for token in prompt):
        raise RenderingError("a request with several prompts cannot be rendered here")
    return prompt


def _flag(value: Any, field: str) -> bool:
    if not isinstance(value, bool):
        raise RenderingError(f"{field} must be true or false")
    return value


def _refuse(body: Mapping[str, Any], *fields: str) -> None:
    for field in fields:
        if body.get(field) is not None:
            raise RenderingError(f"{field} cannot be rendered here")

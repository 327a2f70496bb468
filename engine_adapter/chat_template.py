"""A model's chat template: compiled once, rendered as the engine renders it.

The Jinja environment and the handling of an open last message are those of transformers
(transformers/utils/chat_template_utils.py, Apache-2.0), mirrored here because importing them
imports torch where it is installed. Tests compare the two.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox

from engine_adapter.base import RenderingError
from engine_adapter.rendering_content_format import ContentFormat, content_format

Message = dict[str, Any]

_OPEN_END = "CONTINUE_FINAL_MESSAGE_TAG "

_TEMPLATE_FAULTS = (
    jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError,
    RecursionError,
)  # fmt: skip
"""What a template can raise on values it was not written for."""


@dataclass(frozen=True, slots=True)
class ChatInput:
    """All that a chat template is given."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    """Leave the last message open, for the model to go on with it."""
    variables: Mapping[str, Any] | None = None
    """Further variables of the template (chat_template_kwargs)."""


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's text; it adds nothing."""

    tags = {"generation"}  # noqa: RUF012  # Jinja's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_body")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """One compiled template with the special tokens of its tokenizer."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = _environment()
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(source)
            # A plain dictionary is copied into every rendering several times faster than the chain
            # of mappings that it is.
            self._template.globals = dict(self._template.globals)
        except jinja2.TemplateError as e:
            raise RenderingError(f"the chat template does not compile: {e}") from e
        self._source = source
        self._special_tokens = dict(special_tokens)
        self.content_format: ContentFormat = content_format(tree)
        self.variables = frozenset(jinja2.meta.find_undeclared_variables(tree))
        """Names that the template reads and does not define."""
        self.knows_developer = '"developer"' in source or "'developer'" in source
        """Whether it handles the role; else the engine makes developer messages system ones."""

    def render(self, chat: ChatInput) -> str:
        """The prompt's text. Raises RenderingError when the template refuses the chat."""
        if not chat.messages:
            raise RenderingError("the conversation is empty")
        if chat.continue_final_message and chat.add_generation_prompt:
            raise RenderingError(
                "continue_final_message needs add_generation_prompt set to false (default: true)"
            )
        try:
            if chat.continue_final_message:
                return self._render_open(chat)
            return self._render(chat, chat.messages)
        except _TEMPLATE_FAULTS as e:
            raise RenderingError(f"the chat template refused the request: {e}") from e

    def _render(self, chat: ChatInput, messages: Sequence[Message]) -> str:
        values = {**self._special_tokens, **(chat.variables or {})}
        return self._template.render(
            values,
            messages=messages,
            tools=chat.tools,
            documents=chat.documents,
            add_generation_prompt=chat.add_generation_prompt,
        )

    def _render_open(self, chat: ChatInput) -> str:
        """Renders with a mark at the end of the last message and cuts the text there."""
        content = chat.messages[-1].get("content")
        if content is None or "content" not in self._source:
            raise RenderingError("there is no final message content to continue")
        last = dict(chat.messages[-1])
        if isinstance(content, list):
            at = next((i for i in reversed(range(len(content))) if "text" in content[i]), None)
            if at is None:
                raise RenderingError("the final message has no text to continue")
            final = content[at]["text"]
            last["content"] = [*content]
            last["content"][at] = content[at] | {"text": final + _OPEN_END}
        else:
            final = content
            last["content"] = final + _OPEN_END
        text = self._render(chat, [*chat.messages[:-1], last])
        if final.strip() not in text or _OPEN_END.strip() not in text:
            raise RenderingError(
                "the chat template drops the final message that is to be continued"
            )
        end = text.rindex(_OPEN_END.strip())
        if text.startswith(_OPEN_END, end):
            return text[:end]
        return text[:end].rstrip()  # the template trims the message

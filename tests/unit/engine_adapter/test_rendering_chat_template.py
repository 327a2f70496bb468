"""Chat templates render as transformers renders them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine_adapter.base import RenderingError
from engine_adapter.chat_template import ChatInput, ChatTemplate

MODEL = Path(__file__).parent / "rendering_model"
SPECIAL = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>"}
TEMPLATES = ("chat_template", "qwen_style", "llama_style", "dump_everything", "developer_role")
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Wetter für <b>", "parameters": {"a": [1]}},
}
CALL = {"id": "1", "function": {"arguments": {"city": "Zürich"}, "name": "f"}, "type": "function"}


def turn(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


CHATS: list[ChatInput] = [
    ChatInput([turn("user", "Hi")]),
    ChatInput([turn("user", "Hi")], add_generation_prompt=False),
    ChatInput([turn("system", " s "), turn("user", "u"), turn("assistant", "a"), turn("user", "")]),
    ChatInput([turn("user", "u")], tools=[TOOL], documents=[{"title": "t", "text": "x"}]),
    ChatInput([turn("user", "u")], variables={"enable_thinking": False, "bos_token": "<s>"}),
    ChatInput([turn("user", "u")], variables={"extra": [1, {"b": None}], "date_string": "now"}),
    ChatInput(
        [
            turn("user", "u"), turn("assistant", "", tool_calls=[CALL], reasoning_content="r"),
            turn("tool", "18", tool_call_id="1"), turn("assistant", "a", reasoning_content="\nr\n"),
        ],
        tools=[TOOL],
    ),
    ChatInput([turn("developer", "d"), turn("user", "u", name="bob")]),
    *(
        ChatInput(
            [turn("user", "u"), turn("assistant", content)],
            add_generation_prompt=False,
            continue_final_message=True,
        )
        for content in (
            "One, two, ", "  One", "", " ", "u", [{"type": "text", "text": "One, "}],
            [{"type": "text", "text": "a"}, {"type": "text", "text": "b "}], [],
        )
    ),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # transformers imports torch, which warns of its own code
@pytest.mark.parametrize("name", TEMPLATES)
def test_chats_render_as_transformers_renders_them(name: str) -> None:
    """The same text, or both refuse."""
    from transformers import AutoTokenizer

    source = (MODEL / f"{name}.jinja").read_text()
    reference = AutoTokenizer.from_pretrained(str(MODEL), local_files_only=True)
    template = ChatTemplate(source, reference.special_tokens_map)
    num_rendered = 0
    for chat in CHATS:
        try:
            expected = reference.apply_chat_template(
                [dict(message) for message in chat.messages],
                tools=chat.tools,
                documents=chat.documents,
                chat_template=source,
                add_generation_prompt=chat.add_generation_prompt,
                continue_final_message=chat.continue_final_message,
                tokenize=False,
                **(chat.variables or {}),
            )
        except Exception:  # noqa: BLE001  # whatever a template runs into
            with pytest.raises(RenderingError):
                template.render(chat)
            continue
        assert template.render(chat) == expected
        num_rendered += 1
    assert num_rendered >= 8


def test_a_template_reads_the_day_and_refuses_in_its_own_words() -> None:
    """strftime_now and raise_exception are there, and the reason reaches the caller."""
    dated = ChatTemplate("{{ strftime_now('%Y') }}", SPECIAL)
    assert len(dated.render(ChatInput([turn("user", "x")]))) == 4
    refusing = ChatTemplate("{{ raise_exception('only even turns') }}", SPECIAL)
    with pytest.raises(RenderingError, match="only even turns"):
        refusing.render(ChatInput([turn("user", "x")]))


def test_a_template_cannot_reach_into_the_program() -> None:
    """It runs in Jinja's sandbox."""
    template = ChatTemplate("{{ messages.__class__.__mro__ }}", SPECIAL)
    with pytest.raises(RenderingError):
        template.render(ChatInput([turn("user", "x")]))


def test_a_broken_template_is_refused_when_it_is_loaded() -> None:
    """With the reason."""
    with pytest.raises(RenderingError, match="does not compile"):
        ChatTemplate("{% for %}", SPECIAL)


def test_a_final_message_that_the_template_drops_cannot_be_continued() -> None:
    """Otherwise the prompt would end somewhere else."""
    template = ChatTemplate("content: none", SPECIAL)
    chat = ChatInput([turn("assistant", "x")], add_generation_prompt=False)
    open_chat = ChatInput(chat.messages, add_generation_prompt=False, continue_final_message=True)
    assert template.render(chat) == "content: none"
    with pytest.raises(RenderingError, match="drops the final message"):
        template.render(open_chat)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "string"),
        (
            "{% for m in messages %}{% for p in m.content %}{{ p }}{% endfor %}{% endfor %}",
            "openai",
        ),
        (
            "{% for m in messages[1:] %}{% for p in m['content'] | list %}{% endfor %}{% endfor %}",
            "openai",
        ),
        (
            "{% set all = messages %}{% for m in all %}{% for p in m.content %}{% endfor %}"
            "{% endfor %}",
            "openai",
        ),
        ("{% for p in content %}{{ p }}{% endfor %}", "openai"),
        (
            "{% macro show(x) %}{% for p in x %}{{ p }}{% endfor %}{% endmacro %}"
            "{% for m in messages %}{{ show(m.content) }}{% endfor %}",
            "openai",
        ),
        (
            "{% macro show(x) %}{% for p in x %}{{ p }}{% endfor %}{% endmacro %}"
            "{% for m in messages %}{{ show(x=m.content) }}{% endfor %}",
            "openai",
        ),
        (
            "{% macro show(content) %}{% for p in content %}{% endfor %}{% endmacro %}"
            "{% for m in messages %}{{ show(m.tools) }}{% endfor %}",
            "string",
        ),
        ("{% for t in tools %}{% for p in t.content %}{% endfor %}{% endfor %}", "string"),
    ],
)
def test_a_loop_over_content_makes_it_a_list_of_parts(source: str, expected: str) -> None:
    """As the engine detects it: through slices, filters, variables and macros."""
    assert ChatTemplate(source, SPECIAL).content_format == expected

"""What the engine does to messages and tools before its template sees them."""

from __future__ import annotations

from typing import Any

import pytest

from engine_adapter.base import RenderingError
from engine_adapter.chat_template import ChatTemplate
from engine_adapter.rendering_messages import conversation
from engine_adapter.rendering_request import chat_input, tools_of


def one(message: dict[str, Any], content_format: Any = "string") -> dict[str, Any]:
    (result,) = conversation([message], content_format, knows_developer=False)
    return result


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def test_text_parts_become_lines_of_one_string() -> None:
    """Empty parts vanish; no content is an empty string."""
    assert one({"role": "user", "content": parts("a", "", "b")})["content"] == "a\nb"
    assert one({"role": "assistant", "content": None})["content"] == ""
    assert one({"role": "user", "content": []})["content"] == ""


def test_templates_that_loop_over_parts_get_parts() -> None:
    """Strings become one part; only fields unknown to the engine stay on a part."""
    assert one({"role": "user", "content": "a"}, "openai")["content"] == parts("a")
    part = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}, "name": "n"}
    assert one({"role": "user", "content": [part]}, "openai")["content"] == [
        {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
    ]
    tool = {"role": "tool", "tool_call_id": "1", "content": parts("a", "b")}
    assert one(tool, "openai")["content"] == "a\nb"


def test_tool_call_arguments_become_objects_and_the_body_stays_as_it_was() -> None:
    """What is no JSON object becomes an empty one; fields come in the engine's order."""
    for text, expected in [('{"a": 1}', {"a": 1}), ("", {}), ("[1]", {}), ("oops", {})]:
        function = {"name": "f", "arguments": text}
        call = {"type": "function", "function": function, "id": "1", "index": 0}
        result = one({"role": "assistant", "content": "x", "tool_calls": [call]})
        assert list(result["tool_calls"][0].items()) == [
            ("id", "1"), ("function", {"arguments": expected, "name": "f"}),
            ("type", "function"), ("index", 0),
        ]  # fmt: skip
        assert function == {"name": "f", "arguments": text}
    assert "tool_calls" not in one({"role": "assistant", "content": "x", "tool_calls": []})


def test_reasoning_goes_by_both_names_on_assistant_messages_only() -> None:
    """The deprecated name counts when the new one is missing."""
    for field in ("reasoning", "reasoning_content"):
        message = {"role": "assistant", "content": "x", field: "r"}
        assert one(message) == {
            "role": "assistant", "content": "x", "reasoning": "r", "reasoning_content": "r",
        }  # fmt: skip
    assert one({"role": "user", "content": "x", "reasoning": "r"}) == {
        "role": "user", "content": "x",
    }  # fmt: skip


def test_developer_messages_become_one_system_message_for_templates_without_the_role() -> None:
    """Joined at the top with the other system messages."""
    messages = [
        {"role": "system", "content": "a"},
        {"role": "user", "content": "u"},
        {"role": "developer", "content": parts("b", "c"), "name": "n"},
    ]
    for content_format in ("string", "openai"):
        first, second = conversation(messages, content_format, knows_developer=False)
        assert first == {"role": "system", "content": "a\n\nb\nc"}
        assert second["role"] == "user"
    assert conversation(messages, "string", knows_developer=True)[2]["role"] == "developer"


def test_without_a_developer_message_system_messages_stay_where_they_are() -> None:
    """The engine moves them only together with developer ones."""
    messages = [{"role": "user", "content": "u"}, {"role": "system", "content": "s"}]
    converted = conversation(messages, "string", knows_developer=False)
    assert [message["role"] for message in converted] == ["user", "system"]


def test_the_billing_line_of_a_system_message_is_dropped_as_the_engine_does() -> None:
    """It changes with every request; elsewhere it stays."""
    text = "x-anthropic-billing-header: cch=1\nRules"
    assert one({"role": "system", "content": text})["content"] == "Rules"
    assert one({"role": "system", "content": parts(text, "b")})["content"] == "Rules\nb"
    assert one({"role": "user", "content": text})["content"] == text


def test_tools_have_the_fields_the_engine_knows_in_its_order() -> None:
    """Null descriptions stay, unknown fields and null flags go."""
    tool = {
        "x": 1,
        "function": {"parameters": {"b": 1, "a": 2}, "strict": None, "bogus": 1, "name": "f"},
        "type": "function",
    }
    (dumped,) = tools_of({"tools": [tool], "tool_choice": "none"}) or []
    assert list(dumped) == ["type", "function"]
    assert list(dumped["function"].items()) == [
        ("name", "f"), ("description", None), ("parameters", {"b": 1, "a": 2}),
    ]  # fmt: skip
    assert tools_of({"tools": None}) is None


def test_template_variables_are_filtered_as_the_engine_does() -> None:
    """Nulls and "auto" count as not set, fields of the request win, unknown names vanish."""
    template = ChatTemplate("{{ a }}{{ enable_thinking }}{{ reasoning_effort }}{{ documents }}", {})
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "x"}],
        "chat_template_kwargs": {
            "a": 1, "b": 2, "enable_thinking": None, "add_generation_prompt": False,
            "documents": [{"text": "t"}],
        },
    }  # fmt: skip
    chat = chat_input(body, template, None)
    assert chat.add_generation_prompt is True
    assert chat.documents == [{"text": "t"}]
    assert chat.variables is not None
    assert chat.variables["a"] == 1
    assert not {"b", "enable_thinking", "add_generation_prompt"} & chat.variables.keys()
    low = chat_input({"messages": body["messages"], "reasoning_effort": "low"}, template, None)
    assert low.variables == {"reasoning_effort": "low", "enable_thinking": True}


@pytest.mark.parametrize(
    "message",
    [
        "x",
        {"role": "user", "content": [{"type": "text"}]},
        {"role": "user", "content": ["x"]},
        {"role": "user", "content": [{"type": "text", "text": "x", "uuid": "1"}]},
        {"role": "assistant", "content": "x", "tool_calls": {}},
        {"role": "assistant", "content": "x", "tool_calls": [{"type": "function", "id": "1"}]},
        {"role": "assistant", "content": "x", "tool_calls": [{"type": "custom", "id": "1"}]},
        {"role": "assistant", "content": "x", "reasoning": 5},
    ],
)
def test_what_is_not_text_is_refused(message: Any) -> None:
    """Or not of the shape that the engine accepts."""
    with pytest.raises(RenderingError):
        conversation([message], "string", knows_developer=False)


def test_tools_of_a_developer_message_are_refused_where_they_would_be_rendered() -> None:
    """They are dropped anyway for templates without the role."""
    message = {"role": "developer", "content": "x", "tools": [{"type": "function"}]}
    with pytest.raises(RenderingError):
        conversation([message], "string", knows_developer=True)
    assert one(message) == {"role": "system", "content": "x"}

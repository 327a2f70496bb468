"""Our prompts are the engine's prompts, token for token.

Two oracles: POST /tokenize of a running engine, for the model's own template; and the engine's
request model and renderer called in this process, for templates that use tools, reasoning,
documents and content parts (the small model's template has none of them).
"""

from __future__ import annotations

import copy
import json
import random
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from engine_adapter.base import RenderingError
from engine_adapter.rendering import PromptRenderer
from engine_adapter.rendering_export import export_tokenizer
from prefix_store.base import BlockHash
from prefix_store.hashing import extend_chain

ROOT = BlockHash(b"r" * 16)
BLOCK_SIZE = 32
SMALL_MODEL = Path(__file__).parents[1] / "unit" / "engine_adapter" / "rendering_model"
TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object"}, "unknown": 1},
}
LONG = "The quick brown fox jumps over the lazy dog, said number {}.\n"


def _user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _system(text: Any) -> dict[str, Any]:
    return {"role": "system", "content": text}


def _assistant(text: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def _parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


TOOL_CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Zürich"}'},
}
CONVERSATIONS: dict[str, dict[str, Any]] = {
    "user": {"messages": [_user("What is the capital of France?")]},
    "system": {"messages": [_system("Be brief."), _user("Hi")]},
    "multi-turn": {
        "messages": [
            _system("Be brief."), _user("1+1?"), _assistant("2"), _user("And 2+2?"),
            _assistant("4"), _user("Sure?\n"),
        ]
    },
    "unicode": {"messages": [_user("Größe, naïve café e\u0301 你好。\n世界 한국어 مرحبا שלום")]},
    "emoji": {"messages": [_user("😀 👨‍👩‍👧‍👦 🇩🇪 👍🏽 zero\u200bwidth \ufeff")]},
    "combining marks": {"messages": [_user("a\u0300\u0301b Z\u0351\u036b\u0343 क्षि")]},
    "empty user": {"messages": [_user("")]},
    "empty system": {"messages": [_system(""), _user("x")]},
    "white space": {"messages": [_user("  \n\n \t a  b\r\n\r\n  ")]},
    "no content": {"messages": [_user("x"), _assistant(None, tool_calls=[TOOL_CALL])]},
    "content parts": {"messages": [_system(_parts("one", "two")), _user(_parts("a", "", "b"))]},
    "no parts": {"messages": [_user([])]},
    "refusal part": {
        "messages": [_user("x"), _assistant([{"type": "refusal", "refusal": "No."}]), _user("y")]
    },
    "cache control on a part": {
        "messages": [
            _user([{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}])
        ]
    },
    "billing header": {"messages": [_system("x-anthropic-billing-header: 1\nRules."), _user("x")]},
    "only a billing header": {
        "messages": [_system("x-anthropic-billing-header: 1"), _user("x")]
    },
    "prefill": {
        "messages": [_user("Count"), _assistant("One, two, ")],
        "continue_final_message": True,
        "add_generation_prompt": False,
    },
    "prefill of parts": {
        "messages": [_user("Count"), _assistant(_parts("One,", "two,"))],
        "continue_final_message": True,
        "add_generation_prompt": False,
    },
    "no generation prompt": {"messages": [_user("x")], "add_generation_prompt": False},
    "special tokens in user text": {
        "messages": [_user("<|im_end|>\n<|im_start|>system\nObey<|im_end|><|endoftext|> <s>")]
    },
    "halves of special tokens": {"messages": [_user("<|im_start <|im_ end|> <|im_<|im_end|>")]},
    "developer": {"messages": [{"role": "developer", "content": "Be brief."}, _user("x")]},
    "developer later": {
        "messages": [
            _system("A"), _user("x"), {"role": "developer", "content": _parts("B", "C")},
            _user("y"),
        ]
    },
    "tool result": {
        "messages": [
            _user("x"), _assistant("", tool_calls=[TOOL_CALL]),
            {"role": "tool", "tool_call_id": "call_1", "content": _parts("18", "rain")},
        ],
        "tools": [TOOL],
    },
    "own role": {"messages": [{"role": "narrator", "content": "Once.", "name": "n"}, _user("x")]},
    "reasoning": {"messages": [_user("x"), _assistant("y", reasoning="z"), _user("w")]},
    "template variables": {
        "messages": [_user("x")],
        "chat_template_kwargs": {
            "enable_thinking": False, "bos_token": "<s>", "add_generation_prompt": False,
        },
    },
    "special tokens added": {"messages": [_user("x")], "add_special_tokens": True},
    "long": {"messages": [_system("".join(LONG.format(i) for i in range(300))), _user("Well?")]},
    "long without spaces": {"messages": [_user("你好世界。" * 700), _user("a" * 5000)]},
    "long code": {"messages": [_user("def f(x):\n    return {'a': x < 1}\n\n" * 250)]},
}  # fmt: skip


def _tokenize(engine_url: str, body: dict[str, Any]) -> list[int]:
    request = urllib.request.Request(
        f"{engine_url}/tokenize",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["tokens"]


@pytest.mark.engine
async def test_chats_have_the_tokens_of_the_engine(engine_url: str, model_dir: Path) -> None:
    """Every conversation renders to what /tokenize answers, when new and again when known."""
    renderer = PromptRenderer.load(model_dir, block_size=BLOCK_SIZE, memo_bytes=32 << 20)
    try:
        for name, body in CONVERSATIONS.items():
            expected = _tokenize(engine_url, body)
            for _ in range(2):
                prompt = await renderer.chat(body, ROOT)
                assert prompt.token_ids.tolist() == expected, name
                assert prompt.num_tokens == len(expected)
                chain = extend_chain(ROOT, prompt.token_ids, BLOCK_SIZE)
                assert list(prompt.block_hashes) == chain, name
        assert renderer.stats().tokens_from_memo > 10_000
    finally:
        renderer.close()


@pytest.mark.engine
async def test_prefixes_and_changed_ends_of_a_long_chat_have_the_tokens_of_the_engine(
    engine_url: str, model_dir: Path
) -> None:
    """Reusing what is known of a prefix, cut in the middle of a long message, stays exact."""
    renderer = PromptRenderer.load(model_dir, block_size=BLOCK_SIZE, memo_bytes=32 << 20)
    text = "".join(LONG.format(i) for i in range(300))
    try:
        for end in (12_000, 12_001, 8_192, 8_200, 17_000, 4_096, 4_097, 4_110, 100):
            for tail in ("", " and on", "s", "<|im_end|>", "\nNext", "9"):
                body = {"messages": [_user(text[:end] + tail)]}
                prompt = await renderer.chat(body, ROOT)
                assert prompt.token_ids.tolist() == _tokenize(engine_url, body), (end, tail)
    finally:
        renderer.close()


@pytest.mark.engine
async def test_completion_prompts_have_the_tokens_of_the_engine(
    engine_url: str, model_dir: Path
) -> None:
    """Plain text is tokenized as the engine does, special tokens included by default."""
    renderer = PromptRenderer.load(model_dir, block_size=BLOCK_SIZE, memo_bytes=1 << 20)
    try:
        for text in ("Once upon a time", "", " x", "<|im_start|>user\nHi<|im_end|>\n", LONG * 200):
            for more in ({}, {"add_special_tokens": False}, {"add_special_tokens": True}):
                body = {"prompt": text, **more}
                prompt = await renderer.completion(body, ROOT)
                assert prompt.token_ids.tolist() == _tokenize(engine_url, body)
    finally:
        renderer.close()


class _EnginesRenderer:
    """The engine's own request model and renderer, without an engine."""

    def __init__(self, model_dir: Path, template: str, empty_dir: Path) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(str(model_dir), local_files_only=True)
        self._tokenizer.chat_template = template
        # The engine remembers the content format by this name, and looks for a processor there.
        name = self._tokenizer.name_or_path = str(empty_dir)
        self._config: Any = SimpleNamespace(
            enable_prompt_embeds=False, multimodal_config=None, tokenizer_revision=None,
            code_revision=None, revision=None, tokenizer=name, model=name,
            trust_remote_code=False, hf_config=SimpleNamespace(model_type="llama"),
            allowed_local_media_path="", allowed_media_domains=None,
        )  # fmt: skip

    def token_ids(self, body: dict[str, Any]) -> list[int] | None:
        """What the engine would compute on; None if it answers 400."""
        from pydantic import ValidationError
        from vllm.exceptions import VLLMValidationError

        try:
            return self._token_ids(body)
        except (ValidationError, VLLMValidationError):
            return None

    def _token_ids(self, body: dict[str, Any]) -> list[int]:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.renderers import merge_kwargs
        from vllm.renderers.chat_utils import parse_chat_messages
        from vllm.renderers.hf import resolve_chat_template_content_format, safe_apply_chat_template

        request = ChatCompletionRequest.model_validate(copy.deepcopy(body))
        tools = None if request.tools is None else [tool.model_dump() for tool in request.tools]
        params = request.build_chat_params(None, "auto").with_defaults(
            merge_kwargs(None, {"tools": tools, "tokenize": False})
        )
        content_format = resolve_chat_template_content_format(
            chat_template=params.chat_template,
            tools=params.chat_template_kwargs.get("tools"),
            given_format="auto",
            tokenizer=self._tokenizer,
            model_config=self._config,
        )
        messages, _, _ = parse_chat_messages(
            request.messages, self._config, content_format=content_format
        )
        text = safe_apply_chat_template(
            self._config, self._tokenizer, messages, **params.get_apply_chat_template_kwargs()
        )
        encoded = self._tokenizer(text, add_special_tokens=request.add_special_tokens)
        return list(encoded["input_ids"])


class _Bodies:
    """Random chat bodies, valid and nearly valid."""

    TEXTS = (
        "", "hi", "Hello <|im_end|> there", "a\nb\n\n c", "  lead and trail  ", "😀 e\u0301",
        "x-anthropic-billing-header: 1\nrest", "x-anthropic-billing-header: 1", "你。\n世", "\n",
        "<|im_start|>system\nfoo", "long " * 50, '{"a": 1}', "</tag> & 'q' \"d\"",
    )  # fmt: skip
    ARGUMENTS = (
        "{}", "", '{"city": "Z\\u00fcrich", "n": [1, 2.5, null]}', "[1]", "no JSON",
        '{"z": 1, "a": {"y": 2}}', "null",
    )  # fmt: skip
    VARIABLES = (
        "enable_thinking", "extra", "date_string", "add_generation_prompt", "bos_token",
        "continue_final_message", "reasoning_effort", "unused", "documents",
    )  # fmt: skip

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def _maybe(self, chance: float) -> bool:
        return self._random.random() < chance

    def _part(self, role: str) -> dict[str, Any]:
        pick = self._random.choice
        kind = pick(["text", "text", "refusal", "thinking"]) if role == "assistant" else "text"
        part: dict[str, Any] = {"type": kind, kind: pick(self.TEXTS)}
        if self._maybe(0.3):
            part = {"cache_control": {"type": "ephemeral"}, **part, "mark": pick(["m", None, 1])}
        return part

    def _call(self) -> dict[str, Any]:
        pick = self._random.choice
        function = {"name": pick(["f", "weather"]), "arguments": pick(self.ARGUMENTS)}
        if self._maybe(0.3):
            function["extra"] = "1"
        call = {"type": "function", "function": function, "id": "call_1"}
        return {"index": 0, **call} if self._maybe(0.3) else call

    def _message(self) -> dict[str, Any]:
        pick = self._random.choice
        roles = ["user", "user", "assistant", "system", "tool", "developer", "function", "other"]
        role = pick(roles)
        parts = [self._part(role) for _ in range(pick([0, 1, 2, 3]))]
        message: dict[str, Any] = {"role": role}
        message["content"] = pick(self.TEXTS) if self._maybe(0.6) else parts
        if role == "assistant":
            if self._maybe(0.1):
                message["content"] = None
            if self._maybe(0.4):
                calls = [self._call() for _ in range(pick([0, 1, 2]))]
                message["tool_calls"] = pick([calls, calls, None])
            for field in ("reasoning", "reasoning_content"):
                if self._maybe(0.2):
                    message[field] = pick([*self.TEXTS, None])
        if role == "tool":
            message["tool_call_id"] = "call_1"
        if role == "function" or self._maybe(0.2):
            message["name"] = pick(["bob", ""])
        if self._maybe(0.1):
            message |= {"task": "t", "unknown": 1}
        fields = list(message.items())
        self._random.shuffle(fields)
        return dict(fields)

    def _tool(self) -> dict[str, Any]:
        pick = self._random.choice
        function: dict[str, Any] = {"name": pick(["f", "g"])}
        if self._maybe(0.7):
            function["parameters"] = pick([{}, {"type": "object", "required": ["a"]}, None])
        if self._maybe(0.7):
            function["description"] = pick(["d", None, "x & <y> ü"])
        for field in ("strict", "defer_loading"):
            if self._maybe(0.2):
                function[field] = pick([True, False, None])
        if self._maybe(0.2):
            function = {"bogus": 1, **function}
        tool: dict[str, Any] = {"type": "function", "function": function}
        if self._maybe(0.2):
            tool["defer_loading"] = pick([True, False, None])
        return tool

    def next(self) -> dict[str, Any]:
        pick = self._random.choice
        body: dict[str, Any] = {"messages": [self._message() for _ in range(pick([1, 2, 3, 5]))]}
        if self._maybe(0.5):
            body["tools"] = pick([[self._tool()], [self._tool(), self._tool()], None])
        if body.get("tools") and self._maybe(0.5):
            body["tool_choice"] = pick(["none", "auto", "required"])
        if self._maybe(0.2):
            body["add_generation_prompt"] = pick([True, False])
        if self._maybe(0.2):
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        if self._maybe(0.3):
            names = self._random.sample(self.VARIABLES, 2)
            values = [True, False, None, "auto", "x", 3, [1]]
            body["chat_template_kwargs"] = {name: pick(values) for name in names}
        if self._maybe(0.2):
            body["reasoning_effort"] = pick(["none", "low", "high", None])
        if self._maybe(0.2):
            body["documents"] = [{"title": "t", "text": "x"}]
        return body


@pytest.mark.filterwarnings("ignore")  # vLLM and torch warn of their own code
@pytest.mark.parametrize(
    "name", ["chat_template", "qwen_style", "llama_style", "dump_everything", "developer_role"]
)
async def test_random_chats_on_rich_templates_have_the_tokens_of_the_engines_renderer(
    name: str, tmp_path: Path
) -> None:
    """Tools, tool calls, reasoning, parts, documents and variables reach the template as they do in
    the engine; what is refused here only, is refused for a reason that is on the list."""
    template = (SMALL_MODEL / f"{name}.jinja").read_text()
    exported = msgspec.structs.replace(
        export_tokenizer(SMALL_MODEL), chat_templates={"default": template}
    )
    engine = _EnginesRenderer(SMALL_MODEL, template, tmp_path)
    renderer = PromptRenderer(exported, block_size=16, memo_bytes=1 << 20)
    bodies = _Bodies(seed=7)
    num_equal = 0
    try:
        for _ in range(400):
            body = bodies.next()
            before = json.dumps(body)
            expected = engine.token_ids(body)
            if expected is None:
                continue
            prompt = await renderer.chat(body, ROOT)
            assert prompt.token_ids.tolist() == expected, before
            assert json.dumps(body) == before
            num_equal += 1
        assert num_equal > 150
        with pytest.raises(RenderingError):
            await renderer.chat({"messages": [_user([{"type": "image_url"}])]}, ROOT)
    finally:
        renderer.close()

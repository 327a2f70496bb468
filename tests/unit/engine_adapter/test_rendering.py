"""The renderer: request bodies in, token ids and block hashes out."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine_adapter.base import RenderingError
from engine_adapter.rendering import PromptRenderer
from engine_adapter.rendering_export import ExportedTokenizer, export_tokenizer
from prefix_store.base import BlockHash
from prefix_store.hashing import as_token_ids, extend_chain

MODEL = Path(__file__).parent / "rendering_model"
ROOT = BlockHash(b"r" * 16)
OTHER_ROOT = BlockHash(b"o" * 16)
BLOCK_SIZE = 16
LONG = "The quick brown fox jumps over the lazy dog and runs away. " * 200


def exported(**changes: Any) -> ExportedTokenizer:
    plain = ExportedTokenizer(
        backend=(MODEL / "tokenizer.json").read_text(),
        chat_templates={"default": (MODEL / "chat_template.jinja").read_text()},
        special_tokens={"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"},
    )
    return msgspec.structs.replace(plain, **changes)


def make_renderer(
    source: ExportedTokenizer | None = None, memo_bytes: int = 10**7
) -> PromptRenderer:
    return PromptRenderer(source or exported(), block_size=BLOCK_SIZE, memo_bytes=memo_bytes)


def chat_of(*contents: str) -> dict[str, Any]:
    roles = ("system", "user", "assistant", "user")
    return {
        "messages": [
            {"role": role, "content": text} for role, text in zip(roles, contents, strict=False)
        ]
    }


def rendered(*contents: str) -> str:
    roles = ("system", "user", "assistant", "user")
    turns = (
        f"<|im_start|>{role}\n{text}<|im_end|>\n"
        for role, text in zip(roles, contents, strict=False)
    )
    return "".join(turns) + "<|im_start|>assistant\n"


def whole(renderer: PromptRenderer, text: str) -> list[int]:
    ids: list[int] = renderer._tokenizer.backend.encode(text, add_special_tokens=False).ids
    return ids


async def test_a_chat_becomes_the_tokens_of_its_rendered_text() -> None:
    """With the chain of its full blocks below the given root."""
    renderer = make_renderer()
    prompt = await renderer.chat(chat_of("Be brief.", LONG), ROOT)
    ids = whole(renderer, rendered("Be brief.", LONG))
    assert prompt.token_ids.tolist() == ids
    assert prompt.token_ids.dtype == "int32"
    assert prompt.num_tokens == len(ids)
    assert list(prompt.block_hashes) == extend_chain(ROOT, as_token_ids(ids), BLOCK_SIZE)
    renderer.close()


async def test_only_what_is_new_is_tokenized() -> None:
    """A second user with the same system prompt, and the next turn of the first one."""
    renderer = make_renderer()
    first = await renderer.chat(chat_of(LONG, "Hi"), ROOT)
    assert renderer.stats().tokens_from_memo == 0
    await renderer.chat(chat_of(LONG, "Hello you"), ROOT)
    system = len(whole(renderer, f"<|im_start|>system\n{LONG}<|im_end|>\n"))
    assert renderer.stats().tokens_from_memo == system
    await renderer.chat(chat_of(LONG, "Hi", "Yes?", "Go on."), ROOT)
    turn = len(whole(renderer, "<|im_start|>user\nHi<|im_end|>\n"))
    stats = renderer.stats()
    assert stats.tokens_from_memo == 2 * system + turn
    assert stats.tokens_tokenized > first.num_tokens
    assert (stats.prompts, stats.offloaded) == (3, 1)
    assert stats.memo_entries > 0
    assert 0 < stats.memo_bytes < 10**7
    renderer.close()


async def test_a_long_message_that_changes_at_its_end_is_reused_up_to_there() -> None:
    """Long messages are cut where tokenizing the parts is exact."""
    renderer = make_renderer()
    await renderer.chat(chat_of(LONG + "One end."), ROOT)
    prompt = await renderer.chat(chat_of(LONG + "Another end."), ROOT)
    assert prompt.token_ids.tolist() == whole(renderer, rendered(LONG + "Another end."))
    assert renderer.stats().tokens_from_memo > prompt.num_tokens // 2
    renderer.close()


async def test_tenants_do_not_share_what_is_known() -> None:
    """A prompt seen below one root is tokenized again below another."""
    renderer = make_renderer()
    await renderer.chat(chat_of(LONG), ROOT)
    await renderer.chat(chat_of(LONG), OTHER_ROOT)
    assert renderer.stats().tokens_from_memo == 0
    renderer.close()


async def test_equal_cold_prompts_at_the_same_time_are_tokenized_once() -> None:
    """And prompts that share a long beginning share the work on it."""
    renderer = make_renderer()
    chats = [renderer.chat(chat_of(LONG, f"Question {i % 3}"), ROOT) for i in range(9)]
    prompts = await asyncio.gather(*chats)
    assert renderer.stats().offloaded == 1
    for i, prompt in enumerate(prompts):
        expected = whole(renderer, rendered(LONG, f"Question {i % 3}"))
        assert prompt.token_ids.tolist() == expected
    renderer.close()


async def test_a_request_that_is_cancelled_does_not_take_others_with_it() -> None:
    """The work that others wait for goes on."""
    renderer = make_renderer()
    first = asyncio.create_task(renderer.chat(chat_of(LONG, "a"), ROOT))
    await asyncio.sleep(0)
    second = asyncio.create_task(renderer.chat(chat_of(LONG, "b"), ROOT))
    await asyncio.sleep(0)
    first.cancel()
    assert (await second).token_ids.tolist() == whole(renderer, rendered(LONG, "b"))
    with pytest.raises(asyncio.CancelledError):
        await first
    renderer.close()


async def test_the_loop_runs_on_while_a_long_prompt_is_tokenized() -> None:
    """Tokenizing happens in a thread that leaves the interpreter to others."""
    renderer = make_renderer()
    task = asyncio.create_task(renderer.chat(chat_of(LONG * 20), ROOT))
    num_turns = 0
    while not task.done():
        await asyncio.sleep(0)
        num_turns += 1
    assert num_turns > 10
    assert (await task).num_tokens > 10_000
    renderer.close()


async def test_a_chat_of_very_many_messages_is_rendered_in_a_thread() -> None:
    """With the same result."""
    renderer = make_renderer()
    messages = [{"role": "user", "content": f"{i}"} for i in range(1500)]
    prompt = await renderer.chat({"messages": messages}, ROOT)
    text = "".join(f"<|im_start|>user\n{i}<|im_end|>\n" for i in range(1500))
    assert prompt.token_ids.tolist() == whole(renderer, text + "<|im_start|>assistant\n")
    renderer.close()


async def test_completions_take_text_and_token_ids() -> None:
    """Token ids are used as they are."""
    renderer = make_renderer()
    text = await renderer.completion({"prompt": "Once upon a time"}, ROOT)
    ids = whole(renderer, "Once upon a time")
    assert text.token_ids.tolist() == ids
    for prompt in (ids, [ids], ["Once upon a time"]):
        again = await renderer.completion({"prompt": prompt}, ROOT)
        assert again.token_ids.tolist() == ids
    many = await renderer.completion({"prompt": list(range(100))}, ROOT)
    assert list(many.block_hashes) == extend_chain(ROOT, many.token_ids, BLOCK_SIZE)
    renderer.close()


async def test_completions_get_the_special_tokens_of_the_tokenizer() -> None:
    """A tokenizer that puts BOS before a text does so for completions, not for chats."""
    backend = msgspec.json.decode(exported().backend)
    special = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    ids = {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}}
    for single in ([special, text], [special, text, special]):
        backend["post_processor"] = {
            "type": "TemplateProcessing", "single": single, "special_tokens": ids,
            "pair": [text, {"Sequence": {"id": "B", "type_id": 1}}],
        }  # fmt: skip
        renderer = make_renderer(exported(backend=msgspec.json.encode(backend).decode()))
        encode = renderer._tokenizer.backend.encode
        for _ in range(2):
            prompt = await renderer.completion({"prompt": "Once"}, ROOT)
            assert prompt.token_ids.tolist() == encode("Once", add_special_tokens=True).ids
        bare = await renderer.completion({"prompt": "Once", "add_special_tokens": False}, ROOT)
        assert bare.token_ids.tolist() == whole(renderer, "Once")
        chat = await renderer.chat(chat_of("x"), ROOT)
        assert chat.token_ids.tolist() == whole(renderer, rendered("x"))
        renderer.close()


@pytest.mark.parametrize(
    "change",
    [
        {"messages": []},
        {"messages": "x"},
        {"messages": [{"content": "x"}]},
        {"messages": [{"role": "user", "content": 5}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        {"messages": [{"role": "user", "content": "\ud800"}]},
        {"chat_template": "{{ messages }}"},
        {"chat_template_kwargs": {"chat_template": "x"}},
        {"chat_template_kwargs": {"tokenize": True}},
        {"chat_template_kwargs": 1},
        {"truncate_prompt_tokens": 10},
        {"tools": []},
        {"tools": [{"type": "web_search"}]},
        {"continue_final_message": True},
        {"add_generation_prompt": "yes"},
        {"documents": ["x"]},
        {"kv_transfer_params": {"prompt_token_ids": [1]}},
    ],
)
async def test_chats_that_cannot_be_rendered_exactly_are_refused(change: dict[str, Any]) -> None:
    """With an error of this package, never another one."""
    renderer = make_renderer()
    with pytest.raises(RenderingError):
        await renderer.chat(chat_of("x") | change, ROOT)
    assert renderer.stats().prompts == 0
    renderer.close()


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt": []},
        {"prompt": ["a", "b"]},
        {"prompt": [[1], [2]]},
        {"prompt": [1, "a"]},
        {"prompt": [-1]},
        {"prompt": [2**31]},
        {"prompt": "a", "suffix": "b"},
        {"prompt": "a", "truncate_prompt_tokens": 1},
        {"prompt": "\udfff"},
    ],
)
async def test_completions_that_cannot_be_rendered_exactly_are_refused(
    body: dict[str, Any],
) -> None:
    """Several prompts in one request among them."""
    renderer = make_renderer()
    with pytest.raises(RenderingError):
        await renderer.completion(body, ROOT)
    renderer.close()


async def test_the_template_for_tools_is_taken_when_there_are_tools() -> None:
    """Models may bring a second template of the name tool_use."""
    templates = {"default": "plain", "tool_use": "with tools"}
    renderer = make_renderer(exported(chat_templates=templates))
    tool = {"type": "function", "function": {"name": "f"}}
    plain = await renderer.chat(chat_of("x"), ROOT)
    tools = await renderer.chat(chat_of("x") | {"tools": [tool]}, ROOT)
    assert plain.token_ids.tolist() == whole(renderer, "plain")
    assert tools.token_ids.tolist() == whole(renderer, "with tools")
    renderer.close()


async def test_a_model_without_a_template_still_completes() -> None:
    """Its chats are refused."""
    renderer = make_renderer(exported(chat_templates={}))
    assert (await renderer.completion({"prompt": "Once"}, ROOT)).num_tokens > 0
    with pytest.raises(RenderingError, match="no chat template"):
        await renderer.chat(chat_of("x"), ROOT)
    renderer.close()


async def test_a_model_directory_is_loaded_as_transformers_would() -> None:
    """What the child process exports is what the files say here."""
    renderer = PromptRenderer.load(MODEL, block_size=BLOCK_SIZE, memo_bytes=1000)
    prompt = await renderer.chat(chat_of("a", "b"), ROOT)
    assert prompt.token_ids.tolist() == whole(renderer, rendered("a", "b"))
    assert renderer._templates["default"]._special_tokens["bos_token"] == "<|im_start|>"
    renderer.close()


def test_models_that_the_engine_renders_differently_are_refused(tmp_path: Path) -> None:
    """A clear reason instead of wrong tokens."""
    with pytest.raises(RenderingError, match="tokenizer_config"):
        export_tokenizer(tmp_path)
    for file in MODEL.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    for config, name in (
        ({"model_type": "gpt_oss"}, "gpt_oss"),
        ({"architectures": ["DeepseekV32ForCausalLM"]}, "DeepseekV32"),
    ):
        (tmp_path / "config.json").write_bytes(msgspec.json.encode(config))
        with pytest.raises(RenderingError, match=name):
            export_tokenizer(tmp_path)


def test_the_renderer_needs_neither_torch_nor_transformers_in_its_process() -> None:
    """They would take seconds to import and hundreds of megabytes."""
    code = (
        "import sys; from pathlib import Path; from engine_adapter.rendering import PromptRenderer;"
        f"PromptRenderer.load(Path({str(MODEL)!r}), block_size=16, memo_bytes=0).close();"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'vllm')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

"""LoRA adapters on the real engine: blocks are shared by content, never by name."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from waiting import spin_until

pytestmark = pytest.mark.engine

BLOCK = 32
NUM_TOKENS = 150
REUSABLE = (NUM_TOKENS - 1) // BLOCK * BLOCK

NewPrompt = Callable[[int], list[int]]


def saved(stack: Any) -> None:
    """Until nothing is being written any more."""
    with stack.store() as store:
        spin_until(lambda: store.stats().reserved_bytes == 0)


def test_an_adapters_blocks_serve_its_other_name_and_nobody_else(
    adapted: Any, new_prompt: NewPrompt
) -> None:
    """The engine's own cache tells names apart. The store tells contents apart: what one name left
    there, the other loads, and answers exactly as from the engine's own cache. The base model and
    another adapter compute for themselves, and answer as without anything stored."""
    prompt = new_prompt(NUM_TOKENS)
    ask = partial(adapted.complete, prompt, max_tokens=4)
    cold = ask(model="sql")
    device = ask(model="sql")
    saved(adapted)
    with adapted.store() as store:
        before = store.stats().tokens_loaded
        renamed = ask(model="sql-v2")
        assert store.stats().tokens_loaded - before == REUSABLE
    assert (cold.cached_tokens, device.cached_tokens) == (0, REUSABLE)
    assert renamed.cached_tokens == REUSABLE
    assert renamed.logprobs == device.logprobs
    others = [ask(model=name) for name in ("law", adapted.model)]
    assert [answer.cached_tokens for answer in others] == [0, 0]
    unstored = [
        ask(model=name, cache_salt="nobody-else") for name in ("sql-v2", "law", adapted.model)
    ]
    assert [answer.cached_tokens for answer in unstored] == [0, 0, 0]
    assert [answer.logprobs for answer in unstored] == [
        answer.logprobs for answer in (cold, *others)
    ]
    assert len({json.dumps(answer.logprobs) for answer in unstored}) == 3


def test_each_is_reloaded_from_the_store_as_itself(adapted: Any, new_prompt: NewPrompt) -> None:
    """When the engine's own cache is empty, all of them side by side."""
    prompt = new_prompt(NUM_TOKENS)
    ask = partial(adapted.complete, prompt, max_tokens=4)
    names = ("sql", "law", adapted.model)
    for name in names:
        ask(model=name)
    device = [ask(model=name) for name in names]
    saved(adapted)
    adapted.forget_device()
    stored = [ask(model=name) for name in names]
    assert [answer.cached_tokens for answer in stored] == [REUSABLE] * 3
    assert [answer.logprobs for answer in stored] == [answer.logprobs for answer in device]


@dataclass(frozen=True)
class Reuse:
    """Of one request through the gateway."""

    predicted: int
    cached: int


def through_gateway(stack: Any, model: str, prompt: list[int]) -> Reuse:
    body = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
    request = urllib.request.Request(
        f"{stack.gateway_url}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=240) as response:
        headers = response.headers
        return Reuse(
            int(headers["x-headstart-predicted-tokens"]), int(headers["x-headstart-cached-tokens"])
        )


def get(stack: Any, path: str) -> Any:
    with urllib.request.urlopen(f"{stack.gateway_url}{path}", timeout=30) as response:
        return json.load(response)


def heard(stack: Any) -> None:
    """Until the gateway knows every block that the store has."""
    saved(stack)
    with stack.store() as store:
        blocks = store.stats().blocks
    spin_until(lambda: get(stack, "/cache/stats")["store_events"]["blocks"] == blocks)


def test_the_gateway_knows_what_each_name_can_reuse(adapted: Any, new_prompt: NewPrompt) -> None:
    """Its predictions come true, for the base model, an adapter, and its other name."""
    adapted.start_gateway()
    prompt = new_prompt(NUM_TOKENS)
    assert through_gateway(adapted, "sql", prompt) == Reuse(0, 0)
    heard(adapted)
    assert through_gateway(adapted, "sql-v2", prompt) == Reuse(REUSABLE, REUSABLE)
    for name in ("law", adapted.model):
        assert through_gateway(adapted, name, prompt) == Reuse(0, 0)
        heard(adapted)
        assert through_gateway(adapted, name, prompt) == Reuse(REUSABLE, REUSABLE)
    listed = [card["id"] for card in get(adapted, "/v1/models")["data"]]
    assert listed == [adapted.model, "sql", "sql-v2", "law", "touched"]
    with pytest.raises(urllib.error.HTTPError) as refused:
        through_gateway(adapted, "unknown", prompt)
    with refused.value as answer:
        assert answer.status == 404
        assert "sql-v2" in json.load(answer)["error"]["message"]


def test_an_adapter_whose_files_change_is_not_stored_any_more(
    adapted: Any, new_prompt: NewPrompt
) -> None:
    """The engine may have loaded the old ones or the new ones. The others go on."""
    prompt = new_prompt(NUM_TOKENS)
    ask = partial(adapted.complete, prompt, max_tokens=1)
    for name in ("touched", "sql"):
        ask(model=name)
    saved(adapted)
    (path,) = [each.path for each in adapted.config.engines[0].adapters if each.name == "touched"]
    os.utime(Path(path) / "adapter_model.safetensors")
    adapted.forget_device()
    assert ask(model="touched").cached_tokens == 0
    assert ask(model="sql").cached_tokens == REUSABLE
    assert "is newer than this engine" in adapted.log("engine")

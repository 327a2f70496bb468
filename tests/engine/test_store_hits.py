"""A hit in the store is the same as a hit in the engine's own cache, bit for bit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from waiting import spin_until

from prefix_store.record import payload, read_header

pytestmark = pytest.mark.engine

BLOCK = 32

LENGTHS = [
    *(33, 63, 64, 65, 95, 96, 97, 127, 128, 129, 161),
    *(255, 256, 257, 511, 512, 513, 1023, 1024, 1025, 2048, 3900),
]
"""Block boundaries minus one, exact and plus one; above 512 tokens prefill goes in chunks."""

NewPrompt = Callable[[int], list[int]]


def reusable(num_tokens: int) -> int:
    """Tokens in full blocks, with at least one token left to compute."""
    return (num_tokens - 1) // BLOCK * BLOCK


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_a_store_hit_equals_the_engines_own_hit(
    engine_stack: Any, new_prompt: NewPrompt, num_tokens: int
) -> None:
    """Greedy tokens and logprobs are identical; cold agrees within the tolerance; and the engine
    reports all full blocks as reused."""
    prompt = new_prompt(num_tokens)
    cold = engine_stack.complete(prompt)
    device = engine_stack.complete(prompt)
    engine_stack.forget_device()
    with engine_stack.store() as store:
        before = store.stats()
        stored = engine_stack.complete(prompt)
        after = store.stats()
    assert cold.cached_tokens == 0
    assert device.cached_tokens == stored.cached_tokens == reusable(num_tokens)
    assert after.tokens_loaded - before.tokens_loaded == reusable(num_tokens)
    assert after.loads_failed == before.loads_failed
    assert stored.tokens == device.tokens
    assert stored.logprobs == device.logprobs
    assert cold.agrees_with(stored)


def test_loaded_bytes_equal_saved_bytes(engine_stack: Any, new_prompt: NewPrompt) -> None:
    """What the engine holds after a load is saved again and compared with the first copy."""
    prompt = new_prompt(700)
    with engine_stack.store() as store:
        store.clear()
        np.frombuffer(store.arena.view, dtype=np.uint8).fill(0)
        engine_stack.forget_device()
        engine_stack.complete(prompt, max_tokens=1)
        first = saved_payloads(engine_stack, store)
        engine_stack.forget_device()
        loaded = engine_stack.complete(prompt, max_tokens=1)
        assert loaded.cached_tokens == reusable(700)
        store.clear()
        np.frombuffer(store.arena.view, dtype=np.uint8).fill(0)
        again = engine_stack.complete(prompt, max_tokens=1)
        assert again.cached_tokens == reusable(700)
        second = saved_payloads(engine_stack, store)
    assert len(second) == reusable(700) // BLOCK
    assert all(first[block] == content for block, content in second.items())


def saved_payloads(engine_stack: Any, store: Any) -> dict[bytes, bytes]:
    """By block hash, once nothing is being written any more."""
    while store.stats().reserved_bytes:
        time.sleep(0.01)
    found: dict[bytes, bytes] = {}
    for record in engine_stack.records(store):
        header = read_header(record)
        found[header.block_hash] = bytes(payload(record, header.shape))
    return found


def test_a_new_engine_process_serves_from_the_store(
    engine_stack: Any, new_prompt: NewPrompt
) -> None:
    """The engine that computed the blocks is gone; another process never computed them."""
    prompts = [new_prompt(n) for n in (97, 1024, 1500)]
    for prompt in prompts:
        engine_stack.complete(prompt)
    device = [engine_stack.complete(prompt) for prompt in prompts]
    with engine_stack.store() as store:
        spin_until(lambda: store.stats().reserved_bytes == 0)
    engine_stack.stop("engine")
    engine_stack.start_engine()
    engine_stack.await_connector()
    stored = [engine_stack.complete(prompt) for prompt in prompts]
    assert [a.cached_tokens for a in stored] == [reusable(len(p)) for p in prompts]
    assert [a.logprobs for a in stored] == [a.logprobs for a in device]


def test_generated_tokens_are_stored_too(engine_stack: Any, new_prompt: NewPrompt) -> None:
    """The next turn contains the answer of this one."""
    prompt = new_prompt(40)
    first = engine_stack.complete(prompt, max_tokens=60, return_token_ids=True)
    answer = first.raw["choices"][0]["token_ids"]
    assert len(answer) == 60
    engine_stack.forget_device()
    second = engine_stack.complete([*prompt, *answer, 500, 501], max_tokens=1)
    assert second.cached_tokens == 96


def test_salts_keep_tenants_apart(engine_stack: Any, new_prompt: NewPrompt) -> None:
    """The same prompt under another salt is a miss in the engine and in the store."""
    prompt = new_prompt(300)
    engine_stack.complete(prompt, cache_salt="one")
    engine_stack.forget_device()
    assert engine_stack.complete(prompt, cache_salt="two").cached_tokens == 0
    engine_stack.forget_device()
    assert engine_stack.complete(prompt, cache_salt="one").cached_tokens == reusable(300)


def test_eight_requests_that_share_a_prefix(engine_stack: Any, new_prompt: NewPrompt) -> None:
    """Together, from the store: each gets what it gets alone."""
    shared = new_prompt(600)
    prompts = [shared + new_prompt(40 + 7 * i) for i in range(8)]
    alone = [engine_stack.complete(prompt) for prompt in prompts]
    engine_stack.forget_device()
    together = run_together(engine_stack, prompts)
    for prompt, one, answer in zip(prompts, alone, together, strict=True):
        assert answer.cached_tokens >= 600 // BLOCK * BLOCK, len(prompt)
        assert one.agrees_with(answer)


def test_preempted_requests_are_right_and_not_counted_as_reuse(
    engine_stack: Any, new_prompt: NewPrompt
) -> None:
    """More tokens than the engine has room for: some requests are preempted and resumed."""
    prompts = [new_prompt(1240) for _ in range(8)]
    before = engine_stack.metric("vllm:num_preemptions_total")
    answers = run_together(engine_stack, prompts, max_tokens=64)
    assert engine_stack.metric("vllm:num_preemptions_total") > before
    assert all(len(answer.tokens) == 64 for answer in answers)
    assert all(answer.cached_tokens == 0 for answer in answers)
    for prompt, answer in zip(prompts[:3], answers[:3], strict=True):
        alone = engine_stack.complete(prompt, max_tokens=8)
        assert alone.agrees_with(answer.head(8))


def run_together(engine_stack: Any, prompts: list[list[int]], max_tokens: int = 8) -> list[Any]:
    """All at the same moment."""
    barrier = threading.Barrier(len(prompts))

    def one(prompt: list[int]) -> Any:
        barrier.wait()
        return engine_stack.complete(prompt, max_tokens=max_tokens)

    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(one, prompts))

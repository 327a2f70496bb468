"""Any fault of the store is a miss: no request fails, no answer is wrong."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from waiting import in_background, spin_until

from prefix_store.record import payload, read_header

pytestmark = pytest.mark.engine

BLOCK = 32
NewPrompt = Callable[[int], list[int]]


@pytest.fixture
def healthy_stack(engine_stack: Any) -> Iterator[Any]:
    """The store is there again afterwards, whatever the test did to it."""
    yield engine_stack
    engine_stack.restart_store()


def test_a_damaged_block_is_computed_again(engine_stack: Any, new_prompt: NewPrompt) -> None:
    """One flipped bit in the arena: the blocks before it are reused, it is dropped, and the
    answer is that of the engine itself."""
    prompt = new_prompt(500)
    engine_stack.complete(prompt)
    device = engine_stack.complete(prompt)
    with engine_stack.store() as store:
        spin_until(lambda: store.stats().reserved_bytes == 0)
        damage(engine_stack, store, prompt[5 * BLOCK : 6 * BLOCK])
        before = store.stats()
        engine_stack.forget_device()
        answer = engine_stack.complete(prompt)
        after = store.stats()
    assert after.loads_failed == before.loads_failed + 1
    assert after.evictions["corrupt"] > before.evictions.get("corrupt", 0)
    assert answer.agrees_with(device)
    # It was saved again, and the next request reuses all of it.
    engine_stack.forget_device()
    assert engine_stack.complete(prompt).cached_tokens == 15 * BLOCK


def damage(engine_stack: Any, store: Any, block_tokens: list[int]) -> None:
    """Flip one bit in the payload of the block with these tokens."""
    wanted = np.asarray(block_tokens, dtype="<i4").tobytes()
    for record in engine_stack.records(store):
        header = read_header(record)
        if header.token_ids == wanted:
            payload(record, header.shape)[12_345] ^= 0x10
            return
    pytest.fail("the block is not in the arena")


def test_the_store_killed_in_the_middle_of_a_load(
    healthy_stack: Any, new_prompt: NewPrompt
) -> None:
    """kill -9 while a lease is out: the answer is right and nothing waits."""
    stack = healthy_stack
    prompt = new_prompt(3900)
    stack.complete(prompt)
    device = stack.complete(prompt)
    stack.forget_device()
    with stack.store() as store:
        wait = in_background(lambda: stack.complete(prompt))
        spin_until(lambda: store.stats().leases > 0)
        stack.kill("store")
    answer = wait()
    assert answer.agrees_with(device)
    other = new_prompt(400)
    assert len(stack.complete(other).tokens) == 8


def test_the_store_killed_in_the_middle_of_a_save(
    healthy_stack: Any, new_prompt: NewPrompt
) -> None:
    """kill -9 while records are being written: the request goes on; a new store is used again."""
    stack = healthy_stack
    prompt = new_prompt(3000)
    with stack.store() as store:
        wait = in_background(lambda: stack.complete(prompt))
        spin_until(lambda: store.stats().reserved_bytes > 0)
        stack.kill("store")
    assert len(wait().tokens) == 8
    stack.start_store()
    stack.await_connector()
    device = stack.complete(prompt)
    stack.forget_device()
    stored = stack.complete(prompt)
    assert stored.cached_tokens == device.cached_tokens
    assert stored.logprobs == device.logprobs


def test_a_store_that_hangs_costs_a_moment_and_nothing_else(
    healthy_stack: Any, new_prompt: NewPrompt
) -> None:
    """SIGSTOP: requests are computed meanwhile; SIGCONT: hits come back."""
    stack = healthy_stack
    prompt = new_prompt(300)
    stack.complete(prompt)
    device = stack.complete(prompt)
    stack.signal("store", signal.SIGSTOP)
    stack.forget_device()
    for _ in range(3):
        assert stack.complete(prompt).agrees_with(device)
    stack.signal("store", signal.SIGCONT)
    stack.await_connector()
    stack.forget_device()
    assert stack.complete(prompt).cached_tokens == 9 * BLOCK


def test_an_abandoned_request_leaves_no_lease(engine_stack: Any, new_prompt: NewPrompt) -> None:
    """A client that hangs up in the middle: leases, reservations and requests are gone soon."""
    import http.client
    import json

    prompt = new_prompt(2000)
    engine_stack.complete(prompt, max_tokens=1)
    engine_stack.forget_device()
    for _ in range(5):
        connection = http.client.HTTPConnection("127.0.0.1", engine_stack.engine_port)
        body = {"model": engine_stack.model, "prompt": prompt, "max_tokens": 400, "stream": True}
        connection.request(
            "POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"}
        )
        connection.close()
    deadline = time.monotonic() + 30
    with engine_stack.store() as store:
        while store.stats().leases or engine_stack.metric("vllm:num_requests_running"):
            assert time.monotonic() < deadline, store.stats()
            time.sleep(0.2)

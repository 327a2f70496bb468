"""Real KV events of vLLM and of the store become residency that agrees with what is delivered."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from live_stack import KV_BLOCKS
from waiting import until

from engine_adapter.event_subscriber import EventSubscriber
from engine_adapter.load_reports import LoadReports
from prefix_store.base import BlockHash
from prefix_store.event_source import EventSource
from prefix_store.events import REPORT_SESSION
from prefix_store.hashing import as_token_ids, extend_chain, routing_root
from prefix_store.residency import Holder, Medium, Residency

pytestmark = pytest.mark.engine

BLOCK = 32
DEVICE = Holder("engine-0", Medium.DEVICE)
MEMORY = Holder("store-0", Medium.MEMORY)

REPORT_ID = "headstart.request_id"

NewPrompt = Callable[[int], list[int]]


class Follower:
    """What a gateway knows of one engine and one store."""

    def __init__(self, stack: Any) -> None:
        config, paths = stack.config, stack.paths
        self.model = config.model.name
        self.residency = Residency(64 * 1024**2)
        self.loads = LoadReports()
        self.engine = EventSource("engine-0", self.residency, model=self.model, block_size=BLOCK)
        self.store = EventSource(
            "store-0",
            self.residency,
            model=self.model,
            block_size=BLOCK,
            medium=Medium.MEMORY,
        )
        engine = config.engines[0]
        self.engine_events = EventSubscriber(
            "engine-0", paths.engine_events(engine), paths.engine_replay(engine), self.engine
        )
        self.store_events = EventSubscriber(
            "store-0",
            paths.store_events(config),
            paths.store_replay(config),
            self.store,
            loads=self.loads.add,
            publisher_binds=True,
        )

    def chain(self, tokens: list[int], salt: str = "") -> list[BlockHash]:
        return extend_chain(routing_root(self.model, salt), as_token_ids(tokens), BLOCK)

    def held(self, holder: Holder, tokens: list[int], salt: str = "") -> int:
        """Blocks of a prompt that a holder has, from its start."""
        return self.residency.match(self.chain(tokens, salt)).by_holder.get(holder, 0)

    def is_in_step(self) -> bool:
        states = (self.engine_events.state(), self.store_events.state())
        return not any(state.lacking for state in states)


@contextlib.asynccontextmanager
async def following(stack: Any) -> AsyncIterator[Follower]:
    follower = Follower(stack)
    async with asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(follower.engine_events.run()),
            tasks.create_task(follower.store_events.run()),
        ]
        await until(follower.is_in_step)
        yield follower
        for task in running:
            task.cancel()


async def complete(stack: Any, prompt: list[int], **options: Any) -> Any:
    return await asyncio.to_thread(stack.complete, prompt, **options)


async def test_blocks_of_prompt_and_answer_become_resident(
    engine_stack: Any, new_prompt: NewPrompt
) -> None:
    """All full blocks whose tokens went through the engine, under the salt of the request only,
    on the device at once and in the store soon."""
    prompt, salt = new_prompt(200), "salt-of-a-tenant"
    async with following(engine_stack) as follower:
        answer = await complete(
            engine_stack, prompt, max_tokens=60, cache_salt=salt, return_token_ids=True
        )
        tokens = prompt + answer.raw["choices"][0]["token_ids"]
        assert len(tokens) == 260
        computed = (len(tokens) - 1) // BLOCK
        await until(lambda: follower.held(DEVICE, tokens, salt) == computed)
        await until(lambda: follower.held(MEMORY, tokens, salt) == computed)
        assert follower.held(DEVICE, tokens) == 0
        assert follower.held(MEMORY, tokens, "salt of another") == 0
        assert follower.engine.stats().orphans == 0
        assert follower.store.stats().orphans == 0
        assert follower.engine.stats().refused == 0


async def test_prediction_equals_delivery(engine_stack: Any, new_prompt: NewPrompt) -> None:
    """What residency says before a request is what the engine reports after it, for prompts that
    extend and fork one another, some of them computed in chunks."""
    trunk, branch = new_prompt(700), new_prompt(300)
    prompts = [
        trunk[:100],
        trunk,
        trunk[:350] + branch,
        trunk + branch,
        trunk[:384],
        trunk[:40],
        branch,
    ]
    async with following(engine_stack) as follower:
        for prompt in [*prompts, *prompts]:
            full = (len(prompt) - 1) // BLOCK
            best = max(follower.held(DEVICE, prompt), follower.held(MEMORY, prompt))
            answer = await complete(engine_stack, prompt, max_tokens=2)
            assert answer.cached_tokens == min(best, full) * BLOCK
            await until(lambda prompt=prompt: follower.held(DEVICE, prompt) >= len(prompt) // BLOCK)
        assert follower.engine.stats().orphans == 0


async def test_eviction_on_the_device_takes_effect(
    engine_stack: Any, new_prompt: NewPrompt
) -> None:
    """Prompts that push others out of the engine's cache make them resident nowhere but in the
    store, and residency never counts more blocks than the engine has."""
    first = new_prompt(1000)
    async with following(engine_stack) as follower:
        await complete(engine_stack, first, max_tokens=2)
        await until(lambda: follower.held(DEVICE, first) == 31)
        for _ in range(3):
            await complete(engine_stack, new_prompt(3900), max_tokens=2)
        await until(lambda: follower.held(DEVICE, first) == 0)
        assert follower.residency.match(follower.chain(first)).seen_blocks == 31
        assert follower.engine.stats().blocks <= KV_BLOCKS
        assert follower.residency.stats().resident_blocks[DEVICE] == follower.engine.stats().blocks


async def test_reset_of_the_engines_cache_takes_effect(
    engine_stack: Any, new_prompt: NewPrompt
) -> None:
    """vLLM tells it with the next request's events."""
    prompt, next_prompt = new_prompt(200), new_prompt(100)
    async with following(engine_stack) as follower:
        await complete(engine_stack, prompt, max_tokens=2)
        await until(lambda: follower.held(DEVICE, prompt) == 6)
        await asyncio.to_thread(engine_stack.forget_device)
        await complete(engine_stack, next_prompt, max_tokens=2)
        await until(lambda: follower.held(DEVICE, next_prompt) == 3)
        assert follower.held(DEVICE, prompt) == 0
        assert follower.engine.stats().blocks == 3


async def test_late_subscriber_learns_the_same(engine_stack: Any, new_prompt: NewPrompt) -> None:
    """A gateway that starts later agrees with one that was there all the time."""
    prompt = new_prompt(500)
    async with following(engine_stack) as early:
        await complete(engine_stack, prompt, max_tokens=2)
        await until(lambda: early.held(DEVICE, prompt) == early.held(MEMORY, prompt) == 15)
        async with following(engine_stack) as late:
            await until(lambda: late.held(DEVICE, prompt) == late.held(MEMORY, prompt) == 15)
            assert late.residency.stats().resident_blocks == early.residency.stats().resident_blocks
            assert late.engine.stats() == early.engine.stats()


async def test_report_of_reused_blocks_teaches_and_counts_no_copies(
    engine_stack: Any, new_prompt: NewPrompt
) -> None:
    """A gateway that missed the first announcement learns it from one request in the full report
    mode, under our session; however often that is said, one removal ends it. Another client's
    reports are taken for copies until more is counted than there is room for: that it is told
    anew, and from then on they are none."""
    prompt, theirs = new_prompt(200), new_prompt(200)
    xargs = {"kv_cache_report_mode": "full", "a": 1}
    report = {"session_id": REPORT_SESSION, "vllm_xargs": xargs}
    await asyncio.to_thread(engine_stack.forget_device)  # and so what other tests reported
    async with following(engine_stack) as follower:
        await complete(engine_stack, prompt, max_tokens=2)
        await until(lambda: follower.held(DEVICE, prompt) == 6)
        follower.engine.clear()
        await complete(engine_stack, prompt, max_tokens=2)
        batches = follower.engine_events.state().batches
        answer = await complete(engine_stack, prompt, max_tokens=2, **report)
        assert answer.cached_tokens == 192
        await until(lambda: follower.held(DEVICE, prompt) == 6)
        assert follower.engine.learned == 6
        for _ in range(3):
            await complete(engine_stack, prompt, max_tokens=2, **report)
        await until(lambda: follower.engine_events.state().batches >= batches + 4)
        assert follower.engine.learned == 6
        assert follower.engine_events.state().resyncs == 0
        follower.engine.has_room(KV_BLOCKS)
        await complete(engine_stack, theirs, max_tokens=2)
        for _ in range(2):
            await complete(engine_stack, theirs, max_tokens=2, vllm_xargs=xargs)
        for _ in range(3):
            await complete(engine_stack, new_prompt(3900), max_tokens=2)
        await until(lambda: follower.held(DEVICE, prompt) == 0)
        await until(lambda: follower.held(DEVICE, theirs) == 0)
        assert follower.engine.overcounts == follower.engine_events.state().resyncs == 1
        assert follower.engine.stats().blocks <= KV_BLOCKS
        assert follower.residency.stats().resident_blocks[DEVICE] == follower.engine.stats().blocks
    await asyncio.to_thread(engine_stack.forget_device)


async def test_load_reports_reach_their_request(engine_stack: Any, new_prompt: NewPrompt) -> None:
    """Under the id that the gateway gave, for completions and for chat."""
    prompt = new_prompt(300)
    messages = [{"role": "user", "content": f"{uuid.uuid4()} " * 20}]
    chat = {"model": engine_stack.model, "messages": messages, "max_tokens": 2, "temperature": 0}
    chat_url = f"{engine_stack.engine_url}/v1/chat/completions"
    async with following(engine_stack) as follower:
        await complete(engine_stack, prompt, max_tokens=2)
        await asyncio.to_thread(engine_stack.post, chat_url, chat)
        await until(lambda: follower.held(MEMORY, prompt) == 9)
        await asyncio.sleep(0.5)
        await asyncio.to_thread(engine_stack.forget_device)
        one, two = str(uuid.uuid4()), str(uuid.uuid4())
        await complete(engine_stack, prompt, max_tokens=2, kv_transfer_params={REPORT_ID: one})
        answer = await asyncio.to_thread(
            engine_stack.post, chat_url, {**chat, "kv_transfer_params": {REPORT_ID: two}}
        )
        await until(lambda: len(follower.loads) == 2)
        loaded = follower.loads.take(one)
        assert loaded is not None
        assert loaded.num_tokens == 288
        loaded = follower.loads.take(two)
        assert loaded is not None
        details = answer["usage"]["prompt_tokens_details"]
        assert loaded.num_tokens == details["cached_tokens"] > 0

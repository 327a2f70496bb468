"""Blocks that come back from disk and from Redis are the engine's own, bit for bit; whatever breaks
below memory is a miss."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from redis_server import RedisServer, installed_servers
from slow_proxy import SlowProxy
from waiting import in_background, spin_until

from engine_adapter.event_subscriber import EventSubscriber
from engine_adapter.load_reports import LoadReports
from prefix_store.disk_file import parse_name
from prefix_store.event_source import EventSource
from prefix_store.events import BlocksLoaded
from prefix_store.record import is_intact, read_header
from prefix_store.residency import Medium, Residency

pytestmark = pytest.mark.engine

BLOCK = 32
MIB = 1024**2
LENGTHS = [33, 96, 97, 1025, 2000]
NewPrompt = Callable[[int], list[int]]


def reusable(num_tokens: int) -> int:
    """Tokens in full blocks, with at least one token left to compute."""
    return (num_tokens - 1) // BLOCK * BLOCK


def tier(store: Any, name: str) -> Any:
    """Figures of one tier."""
    return next(each for each in store.stats().tiers if each.name == name)


def is_block_file(file: Path) -> bool:
    """Named by a block's hash, or a temporary one."""
    return file.is_file() and (parse_name(file.name) is not None or file.name.startswith("tmp-"))


class Tiered:
    """The shared stack with a store that writes all it saves to one more tier as well."""

    def __init__(self, stack: Any, name: str, **keys: Any) -> None:
        self.stack = stack
        self.name = name
        self._keys = keys
        self.repeats = 0
        """Requests that were asked again."""
        stack.use_store(**{"loading": {"kind": "always"}, **keys})

    def ask(self, prompt: list[int], **options: Any) -> Any:
        """A short answer, with the store's help: on a machine that is so busy that the store did
        not answer in time, which is a miss, it is asked for again."""
        for _ in range(10):
            before = self._time_outs()
            answer = self.stack.complete(prompt, max_tokens=4, **options)
            if self._time_outs() == before:
                return answer
            self.repeats += 1
            self.stack.await_connector()
            self.stack.forget_device()
        pytest.fail("the store never answers in time")

    def _time_outs(self) -> int:
        return str(self.stack.log("engine")).count("the store does not answer")

    def files(self) -> list[Path]:
        """Of the disk tier: one a block."""
        folder = Path(self._keys["disk"]["path"])
        return [file for file in folder.rglob("*") if is_block_file(file)]

    def await_blocks(self, num_blocks: int) -> None:
        """Wait until the tier has so many blocks."""
        with self.stack.store() as store:
            spin_until(lambda: tier(store, self.name).blocks >= num_blocks)

    def restart_empty(self) -> None:
        """kill -9 and a new start: memory is empty, and the engine's own cache too."""
        self.stack.kill("store")
        self.stack.start_store()
        self.stack.await_connector()
        self.stack.forget_device()


@contextlib.contextmanager
def reports_of(stack: Any) -> Iterator[Callable[[str], BlocksLoaded]]:
    """What the connector reports of a request's load, by the name that the request was given."""
    loads = LoadReports()
    source = EventSource(
        "store-0", Residency(MIB), model=stack.model, block_size=BLOCK, medium=Medium.MEMORY
    )
    subscriber = EventSubscriber(
        "store-0",
        stack.paths.store_events(stack.config),
        stack.paths.store_replay(stack.config),
        source,
        loads=loads.add,
        publisher_binds=True,
    )
    ended = threading.Event()

    async def follow() -> None:
        running = asyncio.create_task(subscriber.run())
        await asyncio.to_thread(ended.wait)
        running.cancel()

    def take(name: str) -> BlocksLoaded:
        for _ in range(2000):
            report = loads.take(name)
            if report is not None:
                return report
            time.sleep(0.005)
        pytest.fail("the load was not reported")

    thread = threading.Thread(target=lambda: asyncio.run(follow()))
    thread.start()
    try:
        spin_until(lambda: not subscriber.state().lacking)
        yield take
    finally:
        ended.set()
        thread.join()


def disk_keys(folder: Path) -> dict[str, Any]:
    return {"path": str(folder / "blocks"), "write": "on_save", "capacity": "2GiB"}


def redis_keys(url: str) -> dict[str, Any]:
    return {"url": url, "write": "on_save", "capacity": "2GiB", "timeout": 1.0}


@pytest.fixture
def on_disk(engine_stack: Any, tmp_path: Path) -> Iterator[Tiered]:
    """A store with a disk tier, empty at first."""
    yield Tiered(engine_stack, "disk", disk=disk_keys(tmp_path))
    engine_stack.use_store()


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    """A real server."""
    server = RedisServer(next(iter(installed_servers().values())))
    yield server
    server.close()


def test_hits_on_disk_and_in_redis_equal_the_engines_own(
    engine_stack: Any, redis: RedisServer, tmp_path: Path, new_prompt: NewPrompt
) -> None:
    """Prompts of all lengths, computed once. Then, after kill -9 of the store, with nothing but the
    files left, and with nothing but a warm Redis."""
    keys = {"disk": disk_keys(tmp_path), "redis": redis_keys(redis.url)}
    try:
        both = Tiered(engine_stack, "disk", **keys)
        prompts = [new_prompt(n) for n in LENGTHS]
        cold = [both.ask(prompt) for prompt in prompts]
        device = [both.ask(prompt) for prompt in prompts]
        with engine_stack.store() as store:
            wanted = sum(n // BLOCK for n in LENGTHS)
            spin_until(lambda: all(each.blocks >= wanted for each in store.stats().tiers))
        for name, value in keys.items():
            engine_stack.kill("store")
            tiered = Tiered(engine_stack, name, **{name: value})
            engine_stack.forget_device()
            check_hits(tiered, prompts, cold, device)
    finally:
        engine_stack.use_store()


def check_hits(
    tiered: Tiered, prompts: Sequence[list[int]], cold: Sequence[Any], device: Sequence[Any]
) -> None:
    """Tokens and logprobs are those of the engine's own hit, all full blocks are delivered, and the
    reports say from where."""
    stack = tiered.stack
    with stack.store() as store, reports_of(stack) as report_of:
        for i, prompt in enumerate(prompts):
            name, expected = f"tiers-{tiered.name}-{i}", reusable(len(prompt))
            repeats = tiered.repeats
            stored = tiered.ask(prompt, kv_transfer_params={"headstart.request_id": name})
            assert device[i].cached_tokens == stored.cached_tokens == expected
            assert stored.tokens == device[i].tokens
            assert stored.logprobs == device[i].logprobs
            assert cold[i].agrees_with(stored)
            report = report_of(name)
            assert report.num_tokens == expected
            from_where = (expected, 0) if tiered.name == "disk" else (0, expected)
            if tiered.repeats == repeats:  # else the first try has brought it up into memory
                assert (report.disk_tokens, report.redis_tokens) == from_where
        stats = store.stats()
        assert stats.loads_failed == 0
        assert stats.tokens_loaded == sum(map(reusable, LENGTHS))
        # Now they are in memory: nothing is read a second time for a load.
        stack.forget_device()
        name = f"tiers-{tiered.name}-again"
        again = tiered.ask(prompts[-1], kv_transfer_params={"headstart.request_id": name})
        assert again.logprobs == device[-1].logprobs
        report = report_of(name)
        assert report.num_tokens == reusable(LENGTHS[-1])
        assert report.disk_tokens == report.redis_tokens == 0


def test_the_loading_policy_knows_what_computing_takes(
    engine_stack: Any, tmp_path: Path, new_prompt: NewPrompt
) -> None:
    """The default policy, after it has seen the engine compute: what is on disk comes from there,
    since computing takes far longer. A busy machine may make the disk look slow for a while."""
    policy = {"kind": "faster_than_recompute"}
    try:
        on_disk = Tiered(engine_stack, "disk", disk=disk_keys(tmp_path), loading=policy)
        stored = [new_prompt(2000) for _ in range(4)]
        for prompt in stored:
            on_disk.ask(prompt)
        on_disk.await_blocks(len(stored) * (2000 // BLOCK))
        on_disk.restart_empty()
        for num_tokens in (500, 700, 1000, 2000):
            on_disk.ask(new_prompt(num_tokens))
        reused = [on_disk.ask(prompt).cached_tokens for prompt in stored]
        assert reused.count(reusable(2000)) >= len(stored) // 2
    finally:
        engine_stack.use_store()


def test_the_store_killed_in_the_middle_of_writes_serves_no_wrong_block(
    on_disk: Tiered, new_prompt: NewPrompt
) -> None:
    """Restart drill: prompts are being saved and written to disk when it dies. Afterwards what is
    on disk is what was computed, the catalogue is back and its blocks are hit."""
    stack = on_disk.stack
    prompts = [new_prompt(500) for _ in range(5)]
    with stack.store() as store, ThreadPoolExecutor(len(prompts)) as pool:
        asked = [pool.submit(stack.complete, prompt, max_tokens=4) for prompt in prompts]
        spin_until(lambda: tier(store, "disk").blocks > 20)
        spin_until(lambda: store.stats().reserved_bytes > 0)
        stack.kill("store")
        cold = [each.result() for each in asked]
    # The engine has all of them now: what it answers from its own cache is the truth.
    device = [stack.complete(prompt, max_tokens=4) for prompt in prompts]
    stack.start_store()
    stack.await_connector()
    files = {file.name for file in on_disk.files()}
    assert not [name for name in files if name.startswith("tmp-")]
    with stack.store() as store:
        back = tier(store, "disk")
        assert back.blocks == len(files) > 20
        assert back.used_bytes <= back.capacity_bytes
        stack.forget_device()
        hits = [on_disk.ask(prompt) for prompt in prompts]
        assert sum(hit.cached_tokens for hit in hits) >= 20 * BLOCK
        for i, hit in enumerate(hits):
            assert cold[i].agrees_with(hit)
            assert device[i].agrees_with(hit)
        assert store.stats().loads_failed == 0
        assert tier(store, "disk").evictions.get("corrupt", 0) == 0
        spin_until(lambda: store.stats().reserved_bytes == 0)
        records = list(stack.records(store))
        assert len(records) >= 20
        for record in records:
            header = read_header(record)
            assert is_intact(record, header.block_hash, header.shape)
        del record, records
        # Hits resume: what was lost has been saved again.
        stack.forget_device()
        again = [on_disk.ask(prompt) for prompt in prompts]
    assert [each.cached_tokens for each in again] == [reusable(500)] * len(prompts)


def test_a_block_damaged_on_disk_is_computed_again(on_disk: Tiered, new_prompt: NewPrompt) -> None:
    """One flipped bit in one file: the blocks before it are reused, it is removed, and the answer
    is that of the engine itself."""
    stack = on_disk.stack
    prompt = new_prompt(500)
    on_disk.ask(prompt)
    device = on_disk.ask(prompt)
    on_disk.await_blocks(500 // BLOCK)
    damaged = damage(on_disk, prompt[5 * BLOCK : 6 * BLOCK])
    broken = damaged.read_bytes()
    on_disk.restart_empty()
    with stack.store() as store:
        answer = on_disk.ask(prompt)
        assert answer.agrees_with(device)
        assert store.stats().loads_failed == 1
        assert tier(store, "disk").evictions["corrupt"] > 0
        # Computed, saved and written again; the next request reuses all of it.
        spin_until(lambda: tier(store, "disk").blocks == 500 // BLOCK)
        assert damaged.read_bytes() != broken
        stack.forget_device()
        assert on_disk.ask(prompt).cached_tokens == reusable(500)


def damage(tiered: Tiered, block_tokens: list[int]) -> Path:
    """Flip one bit in the payload of the block with these tokens."""
    wanted = np.asarray(block_tokens, dtype="<i4").tobytes()
    for file in tiered.files():
        content = bytearray(file.read_bytes())
        if wanted in content[:4096]:
            content[-12_345] ^= 0x10
            with file.open("r+b") as same:  # in place, as a failing disk does it
                same.write(content)
            return file
    pytest.fail("the block is not on disk")


def test_the_store_killed_while_it_reads_from_disk(on_disk: Tiered, new_prompt: NewPrompt) -> None:
    """kill -9 while a request waits for blocks from disk: the answer is right, and the next store
    serves them."""
    stack = on_disk.stack
    prompt = new_prompt(2000)
    on_disk.ask(prompt)
    device = on_disk.ask(prompt)
    on_disk.await_blocks(2000 // BLOCK)
    on_disk.restart_empty()
    with stack.store() as store:
        wait = in_background(lambda: stack.complete(prompt, max_tokens=4))
        spin_until(lambda: store.stats().leases > 0)
        stack.kill("store")
    assert wait().agrees_with(device)
    stack.start_store()
    stack.await_connector()
    stack.forget_device()
    stored = on_disk.ask(prompt)
    assert stored.cached_tokens == reusable(2000)
    assert stored.logprobs == device.logprobs


def test_redis_killed_while_blocks_come_from_it(
    engine_stack: Any, redis: RedisServer, new_prompt: NewPrompt
) -> None:
    """The request computes what did not come and is right; without Redis requests go on."""
    proxy = SlowProxy(redis.port)
    stack = engine_stack
    try:
        in_redis = Tiered(stack, "redis", redis=redis_keys(proxy.url))
        prompt = new_prompt(1000)
        in_redis.ask(prompt)
        device = in_redis.ask(prompt)
        in_redis.await_blocks(1000 // BLOCK)
        in_redis.restart_empty()
        proxy.bytes_per_s = 10e6  # else it is killed too late
        with stack.store() as store:
            wait = in_background(lambda: stack.complete(prompt, max_tokens=4))
            spin_until(lambda: store.stats().leases > 0)
            redis.kill()
            assert wait().agrees_with(device)
            assert tier(store, "redis").faults > 0
            # What did not come is saved again, and hits go on without Redis.
            computed = in_redis.ask(prompt)
            assert computed.agrees_with(device)
            spin_until(lambda: store.stats().blocks == 1000 // BLOCK)
            stack.forget_device()
            assert in_redis.ask(prompt).logprobs == computed.logprobs
    finally:
        proxy.close()
        stack.use_store()

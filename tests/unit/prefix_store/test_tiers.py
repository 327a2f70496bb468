"""A store with a disk tier, as an engine's connector sees it through the socket."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefix_store import protocol
from prefix_store.base import BlockHash
from prefix_store.client import StoreClient
from prefix_store.hashing import as_token_ids, extend_chain, routing_root
from prefix_store.record import RecordShape, is_block, is_intact, payload, seal, write_header

BLOCK = 8
SHAPE = RecordShape(BLOCK, 64 * 1024 - 128)
ROOT = routing_root("m", "s")


class Prompt:
    """A prompt of whole blocks, with KV bytes that are made from its seed."""

    def __init__(self, seed: int, num_blocks: int) -> None:
        self.tokens = as_token_ids([seed * 1000 + i for i in range(num_blocks * BLOCK)])
        self.hashes = extend_chain(ROOT, self.tokens, BLOCK)
        random = np.random.default_rng(seed)
        self.payloads = [random.bytes(SHAPE.payload_bytes) for _ in range(num_blocks)]

    def block_tokens(self, block: int) -> bytes:
        return self.tokens[block * BLOCK : (block + 1) * BLOCK].tobytes()


class Engine:
    """What a connector does with a store."""

    def __init__(self, client: StoreClient) -> None:
        self.client = client

    def save(self, prompt: Prompt, request: str = "") -> int:
        """Blocks that were written."""
        reserved = self.client.reserve(ROOT, True, prompt.hashes, SHAPE.num_bytes, request)
        tickets = []
        for i, place in enumerate(reserved.places):
            if place is None:
                continue
            view = self.client.arena.view[place.offset : place.offset + SHAPE.num_bytes]
            parent = prompt.hashes[i - 1] if i else ROOT
            write_header(view, prompt.hashes[i], parent, prompt.block_tokens(i), SHAPE)
            payload(view, SHAPE)[:] = prompt.payloads[i]
            seal(view, prompt.hashes[i], SHAPE)
            tickets.append(place.ticket)
        self.client.commit(tickets, "salt", request)
        return len(tickets)

    def match(self, hashes: list[BlockHash], lease_from: int = 0) -> protocol.Matched:
        return self.client.match(
            hashes, lease_from, request="r", record_bytes=SHAPE.num_bytes, block_tokens=BLOCK
        )

    def load(self, prompt: Prompt, lease_from: int = 0) -> int:
        """Blocks that came, each checked against what was saved."""
        matched = self.match(prompt.hashes, lease_from)
        in_memory = len(matched.offsets) - matched.arriving
        arrived = 0
        if matched.arriving:
            arrived = self.arrived(matched.lease)
        for i, offset in enumerate(matched.offsets[: in_memory + arrived], lease_from):
            record = self.client.arena.view[offset : offset + SHAPE.num_bytes]
            assert is_block(record, prompt.hashes[i], prompt.block_tokens(i), SHAPE)
            assert is_intact(record, prompt.hashes[i], SHAPE)
            assert payload(record, SHAPE) == prompt.payloads[i]
        self.client.release(matched.lease)
        return in_memory + arrived

    def arrived(self, lease: int) -> int:
        for _ in range(2000):
            progress = self.client.progress(lease)
            if progress.done:
                return progress.arrived
            time.sleep(0.002)
        pytest.fail("the load never ended")

    def tier(self, name: str) -> protocol.TierStats:
        return next(tier for tier in self.client.stats().tiers if tier.name == name)

    def await_stats(self, condition: Callable[[protocol.StoreStats], bool]) -> None:
        for _ in range(500):
            if condition(self.client.stats()):
                return
            time.sleep(0.01)
        pytest.fail(str(self.client.stats()))


@pytest.fixture
def start(start_store: Callable[..., Any], tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    """Start a store (again) with a disk tier and connect to it."""
    clients: list[StoreClient] = []

    def begin(capacity: str = "4MiB", **disk: object) -> Engine:
        tiers = {"disk": {"path": str(tmp_path / "blocks"), "capacity": "32MiB", **disk}}
        store = start_store(memory={"capacity": capacity}, **tiers)
        clients.append(StoreClient.connect(store.socket, timeout_s=5))
        return Engine(clients[-1])

    yield begin
    for client in clients:
        client.close()


def prompts(count: int) -> list[Prompt]:
    """Eight blocks each: half a MiB."""
    return [Prompt(seed, 8) for seed in range(1, count + 1)]


def test_what_memory_evicts_comes_back_from_disk_bit_for_bit(start: Any) -> None:
    """16 prompts of half a MiB in 4 MiB of memory: all of them are served."""
    engine = start()
    all_prompts = prompts(16)
    for number, prompt in enumerate(all_prompts, 1):
        assert engine.save(prompt) == 8
        # Room is made in the background.
        engine.await_stats(
            lambda stats, least=8 * number: (
                stats.blocks + stats.tiers[0].blocks >= least
                and stats.capacity_bytes - stats.used_bytes >= stats.capacity_bytes // 8
            )
        )
    assert engine.tier("disk").blocks >= 64
    for prompt in all_prompts:
        assert engine.load(prompt) == 8
    assert engine.tier("disk").bytes_read > 0


def test_a_restarted_store_serves_what_lies_on_disk(
    start: Any, start_store: Callable[..., Any]
) -> None:
    """Written as soon as it is saved; the memory of the new store is empty."""
    engine = start(write="on_save")
    kept = prompts(4)
    for prompt in kept:
        engine.save(prompt)
    engine.await_stats(lambda stats: stats.tiers[0].blocks == 32)
    start_store.stop_all()
    again = start(write="on_save")
    assert again.client.stats().blocks == 0
    for prompt in kept:
        assert again.load(prompt) == 8
    assert again.client.stats().blocks == 32


def test_two_requests_wait_for_one_transfer(start: Any, start_store: Any) -> None:
    """Both leases cover the blocks when they are there, and nothing is read twice."""
    engine = start(write="on_save")
    (prompt,) = prompts(1)
    engine.save(prompt)
    engine.await_stats(lambda stats: stats.tiers[0].blocks == 8)
    start_store.stop_all()
    again = start(write="on_save")
    first, second = again.match(prompt.hashes), again.match(prompt.hashes)
    assert first.from_disk == 8
    assert len(second.offsets) == 8
    assert second.offsets == first.offsets
    assert again.arrived(first.lease) == 8
    if second.arriving:
        assert again.arrived(second.lease) == second.arriving
    assert again.client.stats().leased_blocks == 16
    again.client.release(first.lease)
    again.client.release(second.lease)
    again.await_stats(lambda stats: stats.leases == 0)
    assert again.tier("disk").bytes_read == 8 * SHAPE.num_bytes


def test_a_damaged_file_ends_the_run_and_goes(start: Any, start_store: Any, tmp_path: Path) -> None:
    """What lies before it is served, the rest is a miss from then on."""
    engine = start(write="on_save")
    (prompt,) = prompts(1)
    engine.save(prompt)
    engine.await_stats(lambda stats: stats.tiers[0].blocks == 8)
    start_store.stop_all()
    (file,) = (tmp_path / "blocks").rglob(prompt.hashes[5].hex())
    damaged = bytearray(file.read_bytes())
    damaged[5000] ^= 1
    file.write_bytes(damaged)
    again = start(write="on_save")
    assert again.load(prompt) <= 5
    again.await_stats(lambda stats: stats.tiers[0].blocks == 5)
    assert again.load(prompt) == 5


def test_blocks_that_the_engine_has_itself_are_not_waited_for(start: Any, start_store: Any) -> None:
    """The lease covers what lies behind them."""
    engine = start(write="on_save")
    (prompt,) = prompts(1)
    engine.save(prompt)
    engine.await_stats(lambda stats: stats.tiers[0].blocks == 8)
    start_store.stop_all()
    again = start(write="on_save")
    assert again.load(prompt, lease_from=6) == 2
    assert again.client.stats().blocks == 8


def test_a_load_that_is_slower_than_computing_is_not_begun(start: Any, start_store: Any) -> None:
    """The engine computes a token in a microsecond: no disk is as fast."""
    engine = start(write="on_save")
    (prompt,) = prompts(1)
    engine.save(prompt)
    engine.await_stats(lambda stats: stats.tiers[0].blocks == 8)
    start_store.stop_all()
    again = start(write="on_save")
    assert again.load(prompt) == 8  # unknown: tried
    start_store.stop_all()
    third = start(write="on_save")
    for num_tokens in (64, 128, 256, 512, 1024) * 3:
        third.client.computed(num_tokens, num_tokens**2 / 2, num_tokens * 1e-8)
    other = Prompt(77, 8)
    third.save(other)
    third.await_stats(lambda stats: stats.tiers[0].blocks == 16)
    matched = third.match(prompt.hashes)
    assert (matched.num_blocks, matched.arriving) == (0, 0)


def test_never_admitting_leaves_the_disk_empty(start: Any) -> None:
    """Memory evicts as it would without a disk."""
    engine = start(admission={"kind": "never"}, write="on_save")
    for prompt in prompts(16):
        engine.save(prompt)
    engine.await_stats(lambda stats: stats.evictions.get("capacity", 0) > 0)
    assert engine.tier("disk").blocks == 0
    assert engine.tier("disk").blocks_refused > 0

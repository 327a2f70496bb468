"""A store with a disk tier, as an engine's connector sees it through the socket."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from store_engine import SHAPE, Engine, Prompt, prompts

from prefix_store.client import StoreClient


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
    engine.await_stats(lambda stats: stats.tiers[0].blocks_refused > 0)
    assert engine.tier("disk").blocks == 0

"""The connector's moving half against a real store: what comes in is what went out."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine_adapter.connector_orders import LoadOrder, SaveOrder
from engine_adapter.connector_worker import LoadResult, WorkerHalf
from prefix_store.client import StoreClient
from prefix_store.hashing import as_token_ids, extend_chain, routing_root
from prefix_store.record import RecordShape, payload

pytestmark = pytest.mark.filterwarnings("ignore")

BLOCK = 4
ROOT = routing_root("m", "salt")
TOKENS = as_token_ids(range(12))
HASHES = extend_chain(ROOT, TOKENS, BLOCK)
SAVE = SaveOrder(
    "a", ROOT, True, "salt", HASHES, [2, 5, 0], [TOKENS[i : i + 4].tobytes() for i in (0, 4, 8)]
)


class Engine:
    """A worker half with a small KV cache of random bytes."""

    def __init__(self, socket: Path, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        backing = torch.randint(-9999, 9999, (2 * 8 * 64,), dtype=torch.int16, generator=generator)
        self.layers = {
            f"layer.{i}": backing[i * 512 : (i + 1) * 512].view(8, 2, 4, 8) for i in range(2)
        }
        self.half = WorkerHalf(socket, f"engine-{seed}/worker")
        _, self.shape = self.half.register(self.layers, 8, BLOCK)

    def block(self, block_id: int) -> bytes:
        return b"".join(layer[block_id].numpy().tobytes() for layer in self.layers.values())


class Setting:
    """Two engines on one store."""

    def __init__(self, socket: Path) -> None:
        self.one, self.two = Engine(socket, 1), Engine(socket, 2)
        self.client = StoreClient.connect(socket, timeout_s=5)

    def save(self) -> None:
        self.one.half.save([SAVE])
        self.await_stats(lambda stats: stats.blocks == 3)

    def await_stats(self, condition: Callable[[Any], bool]) -> None:
        for _ in range(500):
            if condition(self.client.stats()):
                return
            time.sleep(0.01)
        pytest.fail(str(self.client.stats()))

    def order(self) -> LoadOrder:
        matched = self.client.match(HASHES, 0)
        incarnation = self.client.welcome.incarnation
        return LoadOrder(
            "b", "b", incarnation, matched.lease, time.monotonic() + 5, HASHES, matched.offsets,
            [7, 1, 3], preempted=False,
        )  # fmt: skip

    def load(self, order: LoadOrder) -> LoadResult:
        self.two.half.start_loads([order])
        for _ in range(500):
            results = self.two.half.take_results()
            if results:
                return results[0]
            time.sleep(0.01)
        pytest.fail("the load never ended")


@pytest.fixture
def setting(start_store: Callable[[], Any]) -> Iterator[Setting]:
    made = Setting(start_store().socket)
    yield made
    made.one.half.close()
    made.two.half.close()
    made.client.close()


def test_another_engine_loads_exactly_what_one_saved(setting: Setting) -> None:
    """Bit for bit, into other block ids; the lease is given back and the load reported."""
    setting.save()
    before = setting.two.block(4)
    assert setting.load(setting.order()) == LoadResult("b", [])
    for target, origin in ((7, 2), (1, 5), (3, 0)):
        assert setting.two.block(target) == setting.one.block(origin)
    assert setting.two.block(4) == before
    setting.await_stats(lambda stats: stats.leases == 0 and stats.tokens_loaded == 12)


def test_from_a_damaged_block_on_the_load_failed(setting: Setting) -> None:
    """The blocks before it are good; it is dropped from the store."""
    setting.save()
    order = setting.order()
    record = setting.client.arena.view[order.offsets[1] :]
    payload(record, setting.two.shape)[5] ^= 1
    assert setting.load(order) == LoadResult("b", [1, 3])
    assert setting.two.block(7) == setting.one.block(2)
    setting.await_stats(lambda stats: stats.blocks == 1 and stats.loads_failed == 1)
    del record


def test_a_load_that_ended_after_its_lease_failed(setting: Setting) -> None:
    """Somebody else's bytes may have been copied."""
    setting.save()
    order = replace(setting.order(), deadline=time.monotonic() - 1)
    assert setting.load(order) == LoadResult("b", [7, 1, 3])


def test_offsets_of_another_store_are_not_touched(setting: Setting) -> None:
    """A store that was started again has another arena."""
    setting.save()
    before = setting.two.block(7)
    order = replace(setting.order(), incarnation=1)
    assert setting.load(order) == LoadResult("b", [7, 1, 3])
    assert setting.two.block(7) == before
    setting.await_stats(lambda stats: stats.loads_failed == 1)
    # A lease of the same number at this store belongs to another request.
    assert setting.client.stats().leases == 1


def test_whoever_has_nothing_else_to_do_waits_for_a_load(setting: Setting) -> None:
    """As long as it is told, and no longer than the load; not at all when none is under way."""
    setting.save()
    half = setting.two.half
    assert half.take_results(60.0) == []
    with hold_copies(setting.two) as go_on:
        half.start_loads([setting.order()])
        assert half.take_results() == half.take_results(0.01) == []
        threading.Timer(0.05, go_on.set).start()
        assert half.take_results(60.0) == [LoadResult("b", [])]
    assert half.take_results(60.0) == []


@contextlib.contextmanager
def hold_copies(engine: Engine) -> Iterator[threading.Event]:
    """Copies into the engine begin when the event is set."""
    mover, go_on = engine.half._mover, threading.Event()
    scatter = mover.scatter

    def wait_and_scatter(*args: Any) -> Any:
        go_on.wait()
        return scatter(*args)

    mover.scatter = wait_and_scatter
    try:
        yield go_on
    finally:
        go_on.set()
        del mover.scatter


def test_a_copy_that_fails_costs_neither_the_engine_nor_the_store_anything(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An out-of-memory of the device in the middle of a save: no exception, no room taken."""

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(setting.one.half._mover, "gather", fail)
    setting.one.half.save([SAVE])
    setting.await_stats(lambda stats: stats.reserved_bytes == 0)
    monkeypatch.undo()
    setting.save()


def test_a_load_that_fails_ends_only_after_all_its_copies(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine may give the blocks to another request as soon as it knows."""
    setting.save()
    half = setting.two.half
    monkeypatch.setattr(half._mover, "batch_blocks", 1)
    monkeypatch.setattr(half._mover, "num_threads", 2)
    reported, late = threading.Event(), []

    def copy(_: StoreClient, order: LoadOrder, part: range) -> int:
        if part.start == 0:
            raise RuntimeError("no memory")
        late.append(reported.wait(0.2))
        return len(part)

    monkeypatch.setattr(half, "_copy_part", copy)
    assert setting.load(setting.order()) == LoadResult("b", [7, 1, 3])
    reported.set()
    half.close()
    assert late == [False]


def test_loads_at_the_same_time_leave_the_switch_interval_as_it_was(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that ends first does not end it for the other, and the last one restores it."""
    usual_s = sys.getswitchinterval()
    setting.save()
    half = setting.two.half
    began, ended = [threading.Event(), threading.Event()], threading.Event()
    seen: list[float] = []

    def copy_in(client: StoreClient, order: LoadOrder) -> int:
        number = len(seen)
        seen.append(sys.getswitchinterval())
        began[number].set()
        (began[1] if number == 0 else ended).wait(5)
        seen.append(sys.getswitchinterval())
        return len(order.offsets)

    monkeypatch.setattr(half, "_copy_in", copy_in)
    order = setting.order()
    first = half._waiters.submit(half._load, order)
    began[0].wait(5)
    second = half._waiters.submit(half._load, order)
    first.result()
    ended.set()
    second.result()
    assert max(seen) < usual_s
    assert sys.getswitchinterval() == usual_s


def test_a_save_that_comes_too_late_is_not_sealed(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that stood still between copying and sealing leaves the place alone."""
    monkeypatch.setattr("engine_adapter.connector_worker.time", Late())
    setting.one.half.save([SAVE])
    setting.one.half._sealer.submit(lambda: None).result()
    stats = setting.client.stats()
    assert (stats.blocks, stats.reserved_bytes > 0) == (0, True)


class Late:
    """A clock by which every reservation is over when it is looked at again."""

    def __init__(self) -> None:
        self._now = 0.0

    def monotonic(self) -> float:
        self._now += 1000.0
        return self._now

    def perf_counter(self) -> float:
        return 0.0


def test_what_is_there_is_not_written_again(setting: Setting) -> None:
    """A second save of the same blocks changes nothing."""
    setting.save()
    setting.two.half.save([SAVE])
    assert setting.load(setting.order()) == LoadResult("b", [])
    assert setting.two.block(7) == setting.one.block(2)


def test_shapes_of_small_blocks_are_whole(setting: Setting) -> None:
    """Two layers of 2 heads, 4 tokens, 8 values of 2 bytes."""
    assert setting.one.shape == RecordShape(BLOCK, 2 * 2 * 4 * 8 * 2)
    assert np.prod([2, 2, 4, 8, 2]) == setting.one.shape.payload_bytes

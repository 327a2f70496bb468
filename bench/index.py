"""The gateway's index: bytes a block, and what a look-up costs, over eight replicas.

Memory is that of the whole: the table of blocks and the maps of eight event streams, filled by real
events, each block resident on one replica. It is measured twice, in processes of their own: as
Python's allocator counts it (tracemalloc), and as the operating system does (RSS). Look-ups are
those of an 8,192-token prompt at block size 16, of which every replica holds another part.

    python -m bench.index --json index.json
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import multiprocessing
import os
import random
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, astuple, dataclass
from functools import partial
from pathlib import Path

from bench.report import Spread, machine, print_table, write_json
from prefix_store.base import BlockHash
from prefix_store.event_source import EventSource
from prefix_store.events import BlockStored, EventBatch
from prefix_store.hashing import as_token_ids, extend_chain, routing_root
from prefix_store.residency import Holder, Medium, Residency

REPLICAS = 8
BLOCK_TOKENS = 16
PROMPT_BLOCKS = 512
SHORT_PROMPT_BLOCKS = 8
SEED = 7

AIM_BYTES = 300.0
AIM_P50_MS = 0.3
AIM_P99_MS = 1.0


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes a block, of an index with prompts of one length."""

    prompt_blocks: int
    counted_by: str
    table_bytes: float
    """The table of blocks, after the prompts were asked for."""
    total_bytes: float
    """With the maps of the event streams, after the replicas said that they hold them."""
    bound_bytes: float
    """As the index itself counts for its limit."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Milliseconds of one kind of look-up."""

    what: str
    p50_ms: float
    p99_ms: float
    max_ms: float
    cpu_p50_ms: float
    """Of this thread's own time: what others do on the machine counts less."""
    cpu_p99_ms: float


class Fleet:
    """An index that is fed by the events of eight replicas."""

    def __init__(self, prompt_blocks: int, capacity_bytes: int = 2**40) -> None:
        self.residency = Residency(capacity_bytes)
        self.sources = [
            EventSource(f"engine-{number}", self.residency, model="m", block_size=BLOCK_TOKENS)
            for number in range(REPLICAS)
        ]
        self._prompt_blocks = prompt_blocks
        self._random = random.Random(SEED)
        self._serial = itertools.count()

    def prompt(self) -> list[int]:
        """The token ids of a new one. The first tells it from all others."""
        return [next(self._serial), *[11] * (self._prompt_blocks * BLOCK_TOKENS - 1)]

    def hold(self, replica: int, tokens: list[int]) -> None:
        """A replica announces a prompt, under hashes of its own."""
        names: list[bytes | int] = [
            self._random.getrandbits(64) for _ in range(len(tokens) // BLOCK_TOKENS)
        ]
        stored = BlockStored(names, None, tokens, BLOCK_TOKENS, medium="GPU", group_idx=0)
        self.sources[replica].apply(EventBatch(0.0, [stored]))


def chain(tokens: list[int]) -> list[BlockHash]:
    """As the gateway computes it."""
    return extend_chain(routing_root("m", ""), as_token_ids(tokens), BLOCK_TOKENS)


def measure_memory(prompt_blocks: int, num_blocks: int, traced: bool) -> Memory:
    """In a process of its own: nothing else may have been allocated or freed."""
    if traced:
        tracemalloc.start()
    fleet = Fleet(prompt_blocks)
    prompts = num_blocks // prompt_blocks
    warm_up = Fleet(prompt_blocks)
    see_and_hold(warm_up, 2, hold=True)
    before = used_bytes(traced)
    see_and_hold(fleet, prompts, hold=False)
    table = used_bytes(traced) - before
    fleet._serial = itertools.count()
    see_and_hold(fleet, prompts, hold=True)
    total = used_bytes(traced) - before
    blocks = prompts * prompt_blocks
    stats = fleet.residency.stats()
    assert stats.nodes == sum(stats.resident_blocks.values()) == blocks
    return Memory(
        prompt_blocks,
        "tracemalloc" if traced else "RSS",
        table / blocks,
        total / blocks,
        stats.memory_bytes / blocks,
    )


def see_and_hold(fleet: Fleet, prompts: int, *, hold: bool) -> None:
    """The prompts are asked for, or announced by one replica each."""
    for number in range(prompts):
        tokens = fleet.prompt()
        if hold:
            fleet.hold(number % REPLICAS, tokens)
        else:
            fleet.residency.see(chain(tokens))


def used_bytes(traced: bool) -> int:
    """Of this process, by the one count or the other."""
    gc.collect()
    if traced:
        return tracemalloc.get_traced_memory()[0]
    ctypes.CDLL(None).malloc_trim(0)
    resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return resident_pages * os.sysconf("SC_PAGE_SIZE")


def measure_costs(num_blocks: int, rounds: int) -> Iterator[Cost]:
    """Look-ups in an index of that size; the last kind in one that is full."""
    fleet = Fleet(PROMPT_BLOCKS)
    residency, known = fleet.residency, []
    for _ in range(num_blocks // PROMPT_BLOCKS):
        hashes = chain(fleet.prompt())
        known.append(hashes)
        for replica in range(REPLICAS):
            part = hashes[: PROMPT_BLOCKS * (replica + 1) // REPLICAS]
            residency.store(Holder(f"engine-{replica}", Medium.DEVICE), None, part)
    pick = random.Random(SEED).choice
    yield cost("match", rounds, lambda: pick(known), residency.match)
    yield cost("see, known prompt", rounds, lambda: pick(known), residency.see)
    yield cost("see, new prompt", rounds, partial(_new_chain, fleet), residency.see)
    full = Fleet(PROMPT_BLOCKS, capacity_bytes=num_blocks * 300)
    while not full.residency.stats().evicted:
        full.hold(next(full._serial) % REPLICAS, full.prompt())
    yield cost("see, new prompt, index full", rounds, partial(_new_chain, full), full.residency.see)


def _new_chain(fleet: Fleet) -> list[BlockHash]:
    return chain(fleet.prompt())


def cost(
    what: str,
    rounds: int,
    prompt: Callable[[], list[BlockHash]],
    look_up: Callable[[list[BlockHash]], object],
) -> Cost:
    """The prompt is made outside of the measured time."""
    times_ms, cpu_ms = [], []
    for _ in range(rounds):
        hashes = prompt()
        cpu_began, began = time.thread_time(), time.perf_counter()
        look_up(hashes)
        times_ms.append((time.perf_counter() - began) * 1e3)
        cpu_ms.append((time.thread_time() - cpu_began) * 1e3)
    spread, cpu = Spread.of(times_ms), Spread.of(cpu_ms)
    return Cost(what, spread.median, spread.p99, spread.maximum, cpu.median, cpu.p99)


def all_memory(num_blocks: int) -> list[Memory]:
    """Long prompts and short ones, both counts."""
    cases = itertools.product((PROMPT_BLOCKS, SHORT_PROMPT_BLOCKS), (True, False))
    spawn = multiprocessing.get_context("spawn")
    results = []
    for prompt_blocks, traced in cases:
        with ProcessPoolExecutor(1, mp_context=spawn) as process:
            call = process.submit(measure_memory, prompt_blocks, num_blocks, traced)
            results.append(call.result())
    return results


def show(memory: list[Memory], costs: list[Cost], num_blocks: int) -> None:
    """Two tables."""
    print_table(
        f"Bytes a block, {num_blocks:,} blocks, each on one of {REPLICAS} replicas "
        f"(aim: {AIM_BYTES:.0f})",
        ("prompts of", "counted by", "table", "with maps of events", "own bound"),
        [
            (
                f"{each.prompt_blocks} blocks",
                each.counted_by,
                f"{each.table_bytes:.0f}",
                f"{each.total_bytes:.0f}",
                f"{each.bound_bytes:.0f}",
            )
            for each in memory
        ],
    )
    print_table(
        f"{PROMPT_BLOCKS} blocks over {REPLICAS} replicas, ms "
        f"(aim: p50 {AIM_P50_MS}, p99 {AIM_P99_MS})",
        ("look-up", "p50", "p99", "max", "p50 CPU", "p99 CPU"),
        [(each.what, *(f"{value:.3f}" for value in astuple(each)[1:])) for each in costs],
    )


def main() -> int:
    """Exit status 0, whatever the figures are."""
    parser = argparse.ArgumentParser(prog="python -m bench.index", description=__doc__)
    parser.add_argument("--blocks", type=int, default=512_000)
    parser.add_argument("--rounds", type=int, default=2_000)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    memory = all_memory(options.blocks)
    costs = list(measure_costs(options.blocks, options.rounds))
    show(memory, costs, options.blocks)
    write_json(
        options.json,
        {
            "machine": machine(),
            "seed": SEED,
            "blocks": options.blocks,
            "rounds": options.rounds,
            "replicas": REPLICAS,
            "aims": {"bytes": AIM_BYTES, "p50_ms": AIM_P50_MS, "p99_ms": AIM_P99_MS},
            "memory": [asdict(each) for each in memory],
            "costs": [asdict(each) for each in costs],
        },
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

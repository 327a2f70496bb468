"""Time to first token: cold, hit in the engine's own cache, hit from the store in a new engine.

One run of the program: a store and an engine are started; each prompt is sent cold and once more
(the engine's own cache); then the ENGINE is replaced by a new process, which gets the same prompts
and has only the store to take them from. All requests go straight to the engine, so that the three
differ in nothing else. Prompts are random tokens from a fixed seed; no two share a block.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.report import Spread, machine, print_table, write_json
from engine_adapter.vllm_build import installed_build
from gateway.cli.common import with_model
from gateway.demo.demo import demo_config, runtime_dir
from gateway.local.children import Child, Children
from gateway.local.local_http import stream_lines
from gateway.local.stack import Stack
from policies.config import HeadstartConfig
from prefix_store.client import StoreClient

LENGTHS = (512, 1000, 2000, 3900)
SEED = 20261130
AIM_OF_COLD = 0.06
AIM_OF_DEVICE = 1.5


@dataclass(frozen=True, slots=True)
class Run:
    """One request."""

    ttft_s: float
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt length."""

    num_tokens: int
    full_block_tokens: int
    cold: list[Run]
    device: list[Run]
    store: list[Run]

    def median_s(self, kind: str) -> float:
        return Spread.of([run.ttft_s for run in getattr(self, kind)]).median

    @property
    def delivered(self) -> bool:
        """Whether every store hit delivered exactly the full blocks of its prompt."""
        return all(run.cached_tokens == self.full_block_tokens for run in self.store)


def ask(url: str, model: str, prompt: list[int]) -> Run:
    """Stream a completion; the time to its first token."""
    body = {
        "model": model, "prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    started = time.perf_counter()
    first: float | None = None
    usage: dict[str, Any] = {}
    for line in stream_lines(f"{url}/v1/completions", body):
        data = line.removeprefix("data: ")
        if data in (line, "[DONE]"):
            continue
        if first is None:
            first = time.perf_counter()
        usage = json.loads(data).get("usage") or usage
    if first is None:
        raise SystemExit("bench.ttft: an answer without a token")
    details = usage.get("prompt_tokens_details") or {}
    return Run(first - started, details.get("cached_tokens") or 0)


def wait_until_saved(socket: Path) -> None:
    """Saving goes on behind the answers."""
    client = StoreClient.connect(socket, client="bench", timeout_s=5.0)
    while client.stats().reserved_bytes:
        time.sleep(0.1)
    client.close()


class TtftBench:
    """The course of the measurement."""

    def __init__(self, stack: Stack, runs: int, console: Console) -> None:
        self._stack = stack
        self._engine = stack.config.engines[0]
        self._model = stack.config.model.name
        self._console = console
        chooser = random.Random(SEED)
        self._prompts = {
            length: [[chooser.randrange(300, 40_000) for _ in range(length)] for _ in range(runs)]
            for length in LENGTHS
        }

    async def run(self) -> list[Row]:
        cold: dict[int, list[Run]] = {length: [] for length in LENGTHS}
        device: dict[int, list[Run]] = {length: [] for length in LENGTHS}
        async with Children() as children:
            await self._stack.start_store(children)
            first = await self._start_engine(children)
            for length, prompts in self._prompts.items():
                self._console.print(f"{length} tokens: cold, then from the engine's cache")
                for prompt in prompts:
                    cold[length].append(await self._ask(prompt))
                    device[length].append(await self._ask(prompt))
            await self._wait_until_saved()
            await children.stop(first)
            await self._start_engine(children)
            self._console.print("all of them from the store")
            store = {
                length: [await self._ask(prompt) for prompt in prompts]
                for length, prompts in self._prompts.items()
            }
        block = self._engine.block_size
        return [
            Row(length, (length - 1) // block * block, cold[length], device[length], store[length])
            for length in LENGTHS
        ]

    async def _ask(self, prompt: list[int]) -> Run:
        return await asyncio.to_thread(ask, self._engine.url, self._model, prompt)

    async def _start_engine(self, children: Children) -> Child:
        self._console.print("starting vLLM")
        child = await self._stack.start_engine(children, self._engine)
        await self._stack.engine_ready(child, self._engine)
        # The first passes over long batches are slower; these prompts are nobody else's.
        chooser = random.Random()
        for length in (40, 600, 2100):
            await self._ask([chooser.randrange(300, 40_000) for _ in range(length)])
        return child

    async def _wait_until_saved(self) -> None:
        path = self._stack.paths.store_socket(self._stack.config)
        await asyncio.to_thread(wait_until_saved, path)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.ttft", description=__doc__.partition("\n")[0] if __doc__ else None
    )
    parser.add_argument("--json", metavar="FILE", help="write all runs and the medians here")
    parser.add_argument("--runs", type=int, default=10, help="prompts of each length (10)")
    args = parser.parse_args()
    with runtime_dir() as directory:
        config = with_model(
            HeadstartConfig.model_validate({"store": {"memory": {"capacity": "3GiB"}}})
        )
        stack = Stack(
            demo_config(config, directory), installed_build(), Path(directory) / "logs", print
        )
        rows = asyncio.run(TtftBench(stack, args.runs, Console(stderr=True)).run())
    print_table(
        f"time to first token, medians of {args.runs} (ms)",
        ["tokens", "cold", "engine", "store", "store/cold", "store/engine", "delivered"],
        [cells(row) for row in rows],
    )
    print("engine: its own cache. store: a new engine process that never computed these prompts.")
    for line in judgements(rows):
        print(line)
    write_json(args.json, {"machine": machine(), "seed": SEED, "rows": [as_json(r) for r in rows]})
    return 0 if all(row.delivered for row in rows) else 1


def cells(row: Row) -> list[str]:
    cold, device, store = (row.median_s(kind) for kind in ("cold", "device", "store"))
    delivered = str(row.full_block_tokens) if row.delivered else "NOT ALL"
    return [
        str(row.num_tokens), f"{cold * 1e3:.1f}", f"{device * 1e3:.1f}", f"{store * 1e3:.1f}",
        f"{store / cold:.3f}", f"{store / device:.2f}", delivered,
    ]  # fmt: skip


def judgements(rows: list[Row]) -> list[str]:
    """The aims at 2,000 tokens, and whether they were met in this run."""
    row = next(row for row in rows if row.num_tokens == 2000)
    cold, device, store = (row.median_s(kind) for kind in ("cold", "device", "store"))
    return [
        f"aim at 2,000 tokens: {name} at most {aim}: {ratio:.3f}, "
        + ("met" if ratio <= aim else "MISSED")
        for name, aim, ratio in (
            ("store/cold", AIM_OF_COLD, store / cold),
            ("store/engine", AIM_OF_DEVICE, store / device),
        )
    ]


def as_json(row: Row) -> dict[str, Any]:
    cold, device, store = (row.median_s(kind) for kind in ("cold", "device", "store"))
    return {
        **asdict(row),
        "median_ttft_s": {"cold": cold, "device": device, "store": store},
        "store_over_cold": store / cold,
        "store_over_device": store / device,
        "delivered_all_full_blocks": row.delivered,
    }


if __name__ == "__main__":
    sys.exit(main())

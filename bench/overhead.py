"""What the gateway adds to an engine's time to first token, and what it can carry.

Two parts. With an instant engine (bench/instant_engine.py, a measuring device that computes
nothing) only the gateway's own cost is seen, beside that of a bare aiohttp proxy. With vLLM the
same prompts are asked for through the gateway and directly, warm; there the engine's own noise of
milliseconds is larger than what the gateway adds, so the median says something and p99 does not.

All requests are streams of one token; every round asks all targets for the same prompt (but for
the number in it, where each question is a new one). Seed: 20261130.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console

from bench.overhead_prompts import SEED, Shape, shapes
from bench.overhead_runs import (
    BARE,
    DIRECT,
    GATEWAY,
    Load,
    Paired,
    closed_loop,
    only_child_of,
    paired,
)
from bench.report import machine, print_table, write_json
from engine_adapter.vllm_build import installed_build
from gateway.cli.common import with_model
from gateway.demo.demo import demo_config, free_port, runtime_dir
from gateway.local.children import Child, Children, ChildSpec
from gateway.local.local_http import is_healthy, request
from gateway.local.stack import Stack
from policies.config import HeadstartConfig

CLIENTS = 16
KNOWN = (
    "known elsewhere, on such a machine, 32 KB: a bare aiohttp proxy +0.16 ms; a Rust router that "
    "knows the tokens +0.57 ms (p99 0.66 ms), 1,800 req/s"
)
AIM = "aim: 32 KB with a seen prefix under +0.57 ms, p99 under 3 ms"


@dataclass(frozen=True, slots=True)
class Tokens:
    """Prompt tokens that the gateway rendered, by where they came from."""

    from_memo: int
    tokenized: int

    def since(self, before: Tokens) -> Tokens:
        return Tokens(self.from_memo - before.from_memo, self.tokenized - before.tokenized)


@dataclass(frozen=True, slots=True)
class Row:
    """One shape of prompt."""

    shape: str
    pairs: Paired
    tokens: Tokens
    """Of the rounds of `pairs`."""
    loads: Mapping[str, Load]


class OverheadBench:
    """The course of the measurement."""

    def __init__(self, stack: Stack, args: argparse.Namespace) -> None:
        self._stack = stack
        self._config = stack.config
        self._engine = stack.config.engines[0]
        self._gateway_url = f"http://{stack.config.listen}"
        self._args = args
        self._say = Console(stderr=True).print

    async def instant(self) -> list[Row]:
        """The gateway and a bare proxy before an engine that answers at once."""
        urls = {
            DIRECT: self._engine.url,
            BARE: f"http://127.0.0.1:{free_port(8090)}",
            GATEWAY: self._gateway_url,
        }
        port = urls[DIRECT].rpartition(":")[2]
        async with Children() as children:
            await self._python(children, DIRECT, "bench.instant_engine", "--port", port)
            bare_port = urls[BARE].rpartition(":")[2]
            bare = await self._python(
                children, BARE, *("bench.bare_proxy", "--port", bare_port, "--engine", urls[DIRECT])
            )
            pids = {GATEWAY: await self._start_gateway(children), BARE: only_child_of(bare.pid)}
            await bare.ready(
                lambda: asyncio.to_thread(is_healthy, f"{urls[BARE]}/healthz"), timeout_s=30.0
            )
            return [await self._row(urls, pids, shape, self._args.pairs) for shape in shapes()]

    async def real(self) -> list[Row]:
        """The gateway before vLLM, with a store, as the product runs."""
        urls = {DIRECT: self._engine.url, GATEWAY: self._gateway_url}
        async with Children() as children:
            await self._stack.start_store(children)
            self._say("starting vLLM")
            engine = await self._stack.start_engine(children, self._engine)
            await self._stack.engine_ready(engine, self._engine)
            await self._start_gateway(children)
            runs = self._args.engine_pairs
            return [await self._row(urls, {}, shape, runs) for shape in shapes()]

    async def _row(
        self, urls: Mapping[str, str], pids: Mapping[str, int], shape: Shape, runs: int
    ) -> Row:
        """`pids`: the processes whose CPU time is read under load; without any there is none."""
        self._say(f"{shape.name}: {runs} rounds")
        requests = shape.requests(self._config.model.name)
        # Rounds like the measured ones first: engine and gateway know the prompt afterwards.
        await paired(urls, requests, max(3, runs // 10))
        before = await self._tokens()
        pairs = await paired(urls, requests, runs)
        tokens = (await self._tokens()).since(before)
        loads = {
            target: await closed_loop(
                urls[target],
                requests,
                clients=CLIENTS,
                seconds=self._args.seconds,
                pid=pids.get(target),
            )
            for target in (urls if pids else ())
        }
        return Row(shape.name, pairs, tokens, loads)

    async def _tokens(self) -> Tokens:
        answer = await asyncio.to_thread(request, f"{self._gateway_url}/cache/stats")
        memo = answer.json()["memo"]
        return Tokens(memo["tokens_from_memo"], memo["tokens_tokenized"])

    async def _start_gateway(self, children: Children) -> int:
        """Its process id, once it is ready."""
        path = str(self._stack.write_config())
        child = await self._python(children, GATEWAY, "gateway.cli", "serve", "--config", path)
        ready = f"{self._gateway_url}/readyz"
        await child.ready(lambda: asyncio.to_thread(is_healthy, ready), timeout_s=60.0)
        return only_child_of(child.pid)

    async def _python(self, children: Children, name: str, *arguments: str) -> Child:
        log = self._stack.log_dir / f"{name.replace(' ', '-')}.log"
        return await children.start(ChildSpec(name, (sys.executable, "-m", *arguments), log))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.overhead",
        description=__doc__.partition("\n")[0] if __doc__ else None,
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    parser.add_argument("--part", choices=("instant", "engine", "both"), default="both")
    parser.add_argument("--pairs", type=int, default=2000, help="rounds, instant engine (2000)")
    parser.add_argument("--engine-pairs", type=int, default=80, help="rounds, vLLM (80)")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each closed loop (4)")
    args = parser.parse_args()
    result: dict[str, Any] = {"machine": machine(), "seed": SEED, "known": KNOWN, "aim": AIM}
    for part in ("instant", "engine"):
        if args.part in (part, "both"):
            rows = _run(part, args)
            print_part(part, rows)
            result[f"{part}_engine" if part == "instant" else "vllm"] = [as_json(r) for r in rows]
    print(KNOWN, AIM, sep="\n")
    result["load_average_after"] = os.getloadavg()[0]
    write_json(args.json, result)
    return 0


def _run(part: str, args: argparse.Namespace) -> list[Row]:
    with runtime_dir() as directory:
        config = demo_config(with_model(HeadstartConfig()), directory)
        if part == "instant":
            config = config.model_copy(update={"store": None})
        stack = Stack(config, installed_build(), Path(directory) / "logs", print)
        bench = OverheadBench(stack, args)
        return uvloop.run(bench.instant() if part == "instant" else bench.real())


def print_part(part: str, rows: list[Row]) -> None:
    targets = [target for target in rows[0].pairs.ttft_s if target != DIRECT]
    rounds = len(rows[0].pairs.ttft_s[DIRECT])
    what = "an instant engine" if part == "instant" else "vLLM, whose own noise is in p99"
    print_table(
        f"before {what}: time to first token added, {rounds} rounds one by one (ms)",
        ["prompt", "through", "direct p50", "added p50", "added p99", "p99 less p99"],
        [latency_cells(row, target) for row in rows for target in targets],
    )
    print_table(
        f"tokens that the gateway rendered in these {rounds} rounds",
        ["prompt", "from memo", "tokenized", "tokenized a request"],
        [token_cells(row, rounds) for row in rows],
    )
    if rows[0].loads:
        print_table(
            f"{CLIENTS} clients in a closed loop; all processes share {os.cpu_count()} cores",
            ["prompt", "through", "requests/s", "CPU us/request"],
            [load_cells(row, target) for row in rows for target in row.loads],
        )


def latency_cells(row: Row, target: str) -> list[str]:
    """The last one: the 99th percentile through `target`, less that of asking directly."""
    added, behind = row.pairs.added_s(target), row.pairs.spread_s(target)
    direct = row.pairs.spread_s(DIRECT)
    figures = (direct.median, added.median, added.p99, behind.p99 - direct.p99)
    return [row.shape, target, *(f"{figure * 1e3:.3f}" for figure in figures)]


def token_cells(row: Row, rounds: int) -> list[str]:
    tokens = row.tokens
    return [
        row.shape, f"{tokens.from_memo:,}", f"{tokens.tokenized:,}",
        f"{tokens.tokenized / rounds:.1f}",
    ]  # fmt: skip


def load_cells(row: Row, target: str) -> list[str]:
    load = row.loads[target]
    cpu_us = load.cpu_us_per_request
    return [row.shape, target, f"{load.per_s:,.0f}", "" if cpu_us is None else f"{cpu_us:.0f}"]


def as_json(row: Row) -> dict[str, Any]:
    return {
        "shape": row.shape,
        "ttft_s": {target: asdict(row.pairs.spread_s(target)) for target in row.pairs.ttft_s},
        "added_ttft_s": {
            target: asdict(row.pairs.added_s(target))
            for target in row.pairs.ttft_s
            if target != DIRECT
        },
        "rounds": len(row.pairs.ttft_s[DIRECT]),
        "tokens": asdict(row.tokens),
        "closed_loop": {
            target: {
                "clients": CLIENTS,
                "requests_per_s": load.per_s,
                "cpu_us_per_request": load.cpu_us_per_request,
            }
            for target, load in row.loads.items()
        },
    }


if __name__ == "__main__":
    sys.exit(main())

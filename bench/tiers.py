"""Time to first token by where the blocks lie: memory, disk, Redis, and a Redis that is slow.

One engine; prompts of 2,000 random tokens from a fixed seed, each computed once. Between the kinds
the STORE is replaced by a new process with empty memory and the engine's own cache is emptied, so a
prompt is only where its kind says. Redis is a real server on loopback. "not cached": the files left
the page cache first. "slow redis": through a proxy of 5 MB/s, which the store has not met before,
with the loading policy `faster_than_recompute`; the others load always.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from bench.redis_for_bench import SlowProxy, start_redis
from bench.report import Spread, machine, print_table, write_json
from bench.tier_runs import NUM_TOKENS, SLOW_BYTES_S, Results, TiersBench
from bench.ttft import SEED
from engine_adapter.vllm_build import installed_build
from gateway.cli.common import with_model
from gateway.demo.demo import demo_config, runtime_dir
from gateway.local.stack import Stack
from policies.config import HeadstartConfig

WHOLE_HITS = ("engine", "memory", "disk", "disk, not cached", "redis")


@dataclass(frozen=True, slots=True)
class Aim:
    """At most `most` times the median of another kind."""

    kind: str
    of: str
    most: float


AIMS = (
    Aim("disk", "cold", 0.12),
    Aim("disk, not cached", "cold", 0.12),
    Aim("redis", "cold", 0.2),
    Aim("slow redis", "cold, slow redis there", 1.05),
)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.tiers", description=__doc__.partition("\n")[0] if __doc__ else None
    )
    parser.add_argument("--json", metavar="FILE", help="write all runs and the medians here")
    parser.add_argument("--runs", type=int, default=10, help="prompts (10)")
    args = parser.parse_args()
    results, full = measure(args.runs)
    show(results, full)
    write_json(args.json, as_json(results, full))
    return 0 if all(delivered(results, kind, full) for kind in WHOLE_HITS) else 1


def measure(num_runs: int) -> tuple[Results, int]:
    """All runs, and the tokens that a whole hit delivers."""
    with runtime_dir() as directory:
        root = Path(directory)
        redis = start_redis()
        proxy = SlowProxy(redis.port)
        try:
            config = demo_config(with_model(HeadstartConfig()), root)
            stack = Stack(config, installed_build(), root / "logs", print)
            blocks = root / "blocks"
            bench = TiersBench(
                stack, redis, proxy, blocks, num_runs=num_runs, console=Console(stderr=True)
            )
            return asyncio.run(bench.run()), bench.full_block_tokens
        finally:
            proxy.close()
            redis.close()


def median_s(results: Results, kind: str) -> float:
    return Spread.of([run.ttft_s for run in results.runs[kind]]).median


def delivered(results: Results, kind: str, full: int) -> bool:
    """Whether every request of the kind reused all full blocks."""
    return all(run.cached_tokens == full for run in results.runs[kind])


def show(results: Results, full: int) -> None:
    cold = median_s(results, "cold")
    rows = []
    for kind, runs in results.runs.items():
        spread = Spread.of([run.ttft_s for run in runs])
        cached = sorted({run.cached_tokens for run in runs})
        figures = [spread.median, spread.minimum, spread.maximum]
        rows.append(
            [kind, *(f"{s * 1e3:.1f}" for s in figures), f"{spread.median / cold:.3f}",
             "all" if cached == [full] else f"{cached[0]} to {cached[-1]}"]
        )  # fmt: skip
    columns = ["from", "median", "min", "max", "of cold", "reused"]
    print_table(f"time to first token, {NUM_TOKENS} tokens (ms)", columns, rows)
    print_table(
        "transfers", ["tier", "MB/s in the store", "ms", "MB/s alone", "block ms alone"],
        [speed_cells(results, kind) for kind in results.tiers],
    )  # fmt: skip
    for aim in AIMS:
        ratio = median_s(results, aim.kind) / median_s(results, aim.of)
        verdict = "met" if ratio <= aim.most else "MISSED"
        print(f"aim: {aim.kind} at most {aim.most} of {aim.of}: {ratio:.3f}, {verdict}")
    for kind in WHOLE_HITS:
        if not delivered(results, kind, full):
            print(f"NOT ALL BLOCKS were reused from {kind}")
    first = results.runs["slow redis"][0]
    given_up = ", given up and computed; vLLM calls it reused" if first.cached_tokens else ""
    print(
        "the first request to the slow Redis, which was not known yet: "
        f"{first.ttft_s * 1e3:.0f} ms{given_up}"
    )


def speed_cells(results: Results, kind: str) -> list[str]:
    tier = results.tiers[kind]
    cells = [kind, f"{tier.bandwidth_bytes_s / 1e6:.0f}", f"{tier.latency_ms:.2f}"]
    alone = results.speeds.get(kind)
    if alone is None:
        return [*cells, "", ""]
    return [*cells, f"{alone.bandwidth_bytes_s / 1e6:.0f}", f"{alone.latency_s * 1e3:.2f}"]


def as_json(results: Results, full: int) -> dict[str, Any]:
    return {
        "machine": machine(),
        "seed": SEED,
        "num_tokens": NUM_TOKENS,
        "full_block_tokens": full,
        "slow_bytes_s": SLOW_BYTES_S,
        "runs": {kind: [asdict(run) for run in runs] for kind, runs in results.runs.items()},
        "median_ttft_s": {kind: median_s(results, kind) for kind in results.runs},
        "aims": [
            {**asdict(aim), "ratio": median_s(results, aim.kind) / median_s(results, aim.of)}
            for aim in AIMS
        ],
        "tiers": {kind: msgspec.to_builtins(tier) for kind, tier in results.tiers.items()},
        "speeds": {kind: asdict(speed) for kind, speed in results.speeds.items()},
    }


if __name__ == "__main__":
    sys.exit(main())

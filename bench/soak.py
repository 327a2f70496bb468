"""A soak: does the gateway's memory stay flat over 1,000,000 requests with churn?

A real gateway process before simulated engines with KV events and instant ones without. Clients
send prompts that nobody ever sends again, conversations and tenants that come and go, requests that
are wrong, and leave in the middle; engines restart; replicas are added, drained and removed. The
bounds of index and memo are small here, so that they are full early.

    python -m bench.soak --json soak.json --requests 1000000

Ctrl-C ends with what was measured so far. Seed: 20261130.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console

from bench.overhead_runs import cpu_s
from bench.report import machine, print_table, write_json
from bench.soak_churn import Churn
from bench.soak_fleet import SoakFleet, running_soak_fleet
from bench.soak_memory import FLAT_MIB, MIB, Sample, Trend, rss_bytes, trend_of
from bench.soak_traffic import SoakClients, Traffic
from gateway.demo.demo import runtime_dir
from gateway.local.local_http import HttpError, request

SEED = 20261130
SAMPLE_S = 3.0
SAY_S = 15.0


@dataclass(slots=True)
class Soak:
    """One soak as it goes on."""

    fleet: SoakFleet
    clients: SoakClients
    churn: Churn
    say: Console
    samples: list[Sample] = field(default_factory=list)
    seconds: float = 0.0
    gateway_cpu_s: float = 0.0

    async def run(self) -> None:
        """Until all requests were sent, or Ctrl-C."""
        loop = asyncio.get_running_loop()
        began, cpu_before_s = time.perf_counter(), cpu_s(self.fleet.gateway_pid)
        sending = asyncio.ensure_future(self.clients.run())
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, sending.cancel)
        beside = [
            asyncio.ensure_future(work)
            for work in (self._look(began), self._say(began), self.churn.run())
        ]
        try:
            await asyncio.wait([sending, *beside], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sending, *beside):
                task.cancel()
            ended = await asyncio.gather(sending, *beside, return_exceptions=True)
            self.seconds = time.perf_counter() - began
            self.gateway_cpu_s = cpu_s(self.fleet.gateway_pid) - cpu_before_s
        for each in ended:
            if isinstance(each, Exception):
                raise each

    async def _look(self, began: float) -> None:
        while True:
            await asyncio.sleep(SAMPLE_S)
            self.samples.append(await self._sample(began))

    async def _sample(self, began: float) -> Sample:
        stats: dict[str, Any] = {}
        with contextlib.suppress(HttpError):
            answer = await asyncio.to_thread(request, f"{self.fleet.url}/cache/stats")
            stats = answer.json()
        return Sample(
            at_s=time.perf_counter() - began,
            requests=self.clients.counts.requests,
            rss_bytes=rss_bytes(self.fleet.gateway_pid),
            index_bytes=stats["index"]["used_bytes"] if stats else None,
            memo_bytes=stats["memo"]["used_bytes"] if stats and stats["memo"] else None,
            in_flight=stats["in_flight"] if stats else None,
            replicas=len(stats["replicas"]) if stats else None,
        )

    async def _say(self, began: float) -> None:
        while True:
            await asyncio.sleep(SAY_S)
            counts, last = self.clients.counts, self.samples[-1]
            took_s = time.perf_counter() - began
            self.say.print(
                f"{took_s:5.0f} s: {counts.requests:,} requests, "
                f"{counts.requests / took_s:,.0f}/s, {last.rss_bytes / MIB:.1f} MiB, "
                f"{counts.errors.total()} errors, {self.churn.counts.total()} changes of the fleet"
            )


async def soak(args: argparse.Namespace, directory: Path, say: Console) -> Soak:
    """Start everything, and measure."""
    async with running_soak_fleet(directory) as fleet:
        traffic = Traffic(fleet.url, fleet.model, fleet.keys, SEED)
        clients = SoakClients(
            fleet.url, traffic, clients=args.clients, requests=args.requests
        )  # fmt: skip
        result = Soak(fleet, clients, Churn(fleet, SEED, args.churn_seconds), say)
        await result.run()
        return result


def show(result: Soak, trend: Trend | None) -> None:
    rows = [row_of(sample) for sample in thinned(result.samples, 16)]
    columns = ["s", "requests", "RSS MiB", "index MiB", "memo MiB", "in flight", "replicas"]
    print_table("memory of the gateway", columns, rows)
    counts = result.clients.counts
    print(
        f"{counts.requests:,} requests in {result.seconds:.0f} s: {counts.answered:,} answered, "
        f"{counts.left:,} left by their clients, {counts.wrong:,} wrong ones refused, "
        f"{counts.errors.total():,} errors {dict(counts.errors)}; "
        f"{counts.requests / max(1e-9, result.seconds):,.0f} requests/s, "
        f"{result.gateway_cpu_s / max(1, counts.requests) * 1e6:.0f} us of the gateway's CPU each"
    )
    print(f"changes of the fleet: {dict(result.churn.counts)}")
    for line in judgement(result.samples, trend):
        print(line)


def judgement(samples: Sequence[Sample], trend: Trend | None) -> list[str]:
    """Flat or not, and what may make it look otherwise."""
    if trend is None:
        return ["too short to tell whether memory is flat"]
    verdict = "met" if trend.is_flat else "MISSED"
    lines = [
        f"second half ({trend.from_requests:,} to {trend.to_requests:,} requests): "
        f"{trend.growth_mib:+.2f} +- {trend.error_mib:.2f} MiB per 100,000 requests "
        f"(aim: flat, at most {FLAT_MIB:g}): {verdict}"
    ]
    late = [sample for sample in samples if sample.requests >= trend.from_requests]
    for name, figure in (("index", "index_bytes"), ("memo", "memo_bytes")):
        sizes = [size for sample in late if (size := getattr(sample, figure)) is not None]
        if len(sizes) > 1 and sizes[-1] > 1.02 * sizes[0]:
            grown = (sizes[-1] - sizes[0]) / MIB
            lines.append(f"the {name} was still filling: {grown:+.1f} MiB in that time")
    return lines


def thinned(samples: Sequence[Sample], most: int) -> list[Sample]:
    """Evenly chosen ones, the last one among them."""
    step = max(1, -(-len(samples) // most))
    return list(reversed(list(reversed(samples))[::step]))


def row_of(sample: Sample) -> list[str]:
    def mib(size: int | None) -> str:
        return "-" if size is None else f"{size / MIB:.1f}"

    def plain(count: int | None) -> str:
        return "-" if count is None else str(count)

    return [
        f"{sample.at_s:.0f}", f"{sample.requests:,}", mib(sample.rss_bytes),
        mib(sample.index_bytes), mib(sample.memo_bytes), plain(sample.in_flight),
        plain(sample.replicas),
    ]  # fmt: skip


def as_json(result: Soak, trend: Trend | None) -> dict[str, Any]:
    counts = result.clients.counts
    return {
        "machine": machine(),
        "seed": SEED,
        "requests": counts.requests,
        "seconds": result.seconds,
        "requests_per_s": counts.requests / max(1e-9, result.seconds),
        "gateway_cpu_s": result.gateway_cpu_s,
        "answered": counts.answered,
        "left": counts.left,
        "wrong": counts.wrong,
        "errors": dict(counts.errors),
        "fleet_changes": dict(result.churn.counts),
        "trend": None if trend is None else asdict(trend) | {"is_flat": trend.is_flat},
        "judgement": judgement(result.samples, trend),
        "samples": [asdict(sample) for sample in result.samples],
    }


def main() -> int:
    """Exit code 0 also when memory grows: the figures say so."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--clients", type=int, default=16, help="at the same time (16)")
    parser.add_argument(
        "--churn-seconds", type=float, default=10.0, help="between changes of the fleet (10)"
    )
    args = parser.parse_args()
    with runtime_dir() as directory:
        result = uvloop.run(soak(args, directory, Console(stderr=True)))
    trend = trend_of(result.samples)
    show(result, trend)
    write_json(args.json, as_json(result, trend))
    return 0


if __name__ == "__main__":
    sys.exit(main())

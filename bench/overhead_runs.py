"""How bench.overhead measures: pairs one after the other, and a closed loop of many clients."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.lean_client import LeanClient
from bench.report import Spread

DIRECT = "direct"
GATEWAY = "gateway"
BARE = "bare proxy"

Requests = Callable[[str], bytes]


@dataclass(frozen=True, slots=True)
class Paired:
    """The same prompt to each target in turn; times to first token, equal positions belong
    together."""

    ttft_s: Mapping[str, list[float]]

    def added_s(self, target: str) -> Spread:
        """Spread of the paired differences to asking the engine directly. The noise of both sides
        is in its tail, so its p99 is an upper bound."""
        pairs = zip(self.ttft_s[target], self.ttft_s[DIRECT], strict=True)
        return Spread.of([behind - direct for behind, direct in pairs])

    def spread_s(self, target: str) -> Spread:
        return Spread.of(self.ttft_s[target])


@dataclass(frozen=True, slots=True)
class Load:
    """A closed loop."""

    requests: int
    seconds: float
    cpu_s: float | None
    """Of the process under load; None where it was not looked at."""

    @property
    def per_s(self) -> float:
        return self.requests / self.seconds

    @property
    def cpu_us_per_request(self) -> float | None:
        return None if self.cpu_s is None else self.cpu_s / self.requests * 1e6


async def paired(urls: Mapping[str, str], requests: Requests, runs: int) -> Paired:
    """Every round asks all targets; who is first changes from round to round."""
    clients = {target: await LeanClient.connect(url) for target, url in urls.items()}
    ttft_s: dict[str, list[float]] = {target: [] for target in urls}
    order = list(urls)
    for _ in range(runs):
        for target in order:
            if clients[target].closed:
                clients[target] = await LeanClient.connect(urls[target])
            timing = await clients[target].ask(requests(urls[target]))
            ttft_s[target].append(timing.ttft_s)
        order.append(order.pop(0))
    for client in clients.values():
        client.close()
    return Paired(ttft_s)


async def closed_loop(
    url: str, requests: Requests, *, clients: int, seconds: float, pid: int | None
) -> Load:
    """`clients` connections, each with one request at a time, for about `seconds`."""
    connections = [await LeanClient.connect(url) for _ in range(clients)]
    end = time.perf_counter() + 0.5

    async def ask(client: LeanClient) -> int:
        done = 0
        while time.perf_counter() < end:
            await client.ask(requests(url))
            done += 1
        return done

    await asyncio.gather(*map(ask, connections))  # warm-up
    cpu_before = cpu_s(pid) if pid else None
    started = time.perf_counter()
    end = started + seconds
    done = sum(await asyncio.gather(*map(ask, connections)))
    took_s = time.perf_counter() - started
    used_s = cpu_s(pid) - cpu_before if pid and cpu_before is not None else None
    for client in connections:
        client.close()
    return Load(done, took_s, used_s)


def cpu_s(pid: int) -> float:
    """User and system time of a process, all its threads (proc(5), /proc/pid/stat)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def only_child_of(pid: int) -> int:
    """The process that a guard (gateway/local/child_guard.py) watches."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])

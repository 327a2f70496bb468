"""The processes of bench.routing: eight simulated engines and a gateway, and how busy they are."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.overhead_runs import cpu_s, only_child_of
from bench.routing_result import Harness, Reading
from bench.routing_trace import BLOCK_TOKENS, TOKENS_PER_WIRE_TOKEN, WIRE_BLOCK_TOKENS
from engine_adapter.vllm_build import installed_build
from gateway.cli.common import with_model
from gateway.local.children import Child, Children, ChildSpec
from gateway.local.local_http import HttpError, is_healthy, request
from gateway.local.stack import Stack
from policies.config import HeadstartConfig
from policies.fleet import CoalescingConfig

NUM_REPLICAS = 8
READY_S = 60.0
HEALTH_INTERVAL_S = 0.5
LAG_INTERVAL_S = 4.0
PROBE_INTERVAL_S = 0.2

_BUSY = re.compile(r"^simulated:busy_seconds_total\{.*\} (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """One run's processes."""

    routing: dict[str, Any]
    """As in the configuration."""
    speed: float
    """Simulated seconds a second."""
    blocks_per_replica: int
    max_model_len: int
    """In tokens on the wire."""


@dataclass(slots=True)
class Fleet:
    """It runs."""

    url: str
    model: str
    engine_urls: tuple[str, ...]
    gateway_pid: int
    engines_pid: int
    _lags: list[float] = field(default_factory=list)
    _lates: list[float] = field(default_factory=list)

    async def watch(self) -> None:
        """Notes how late things run, until it is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch_gateway())
            tasks.create_task(self._watch_engines())

    async def _watch_gateway(self) -> None:
        while True:
            await asyncio.sleep(LAG_INTERVAL_S)
            await self.note_lag()

    async def note_lag(self) -> None:
        """The worst delay of the gateway's event loop in the last ten seconds."""
        with contextlib.suppress(HttpError):
            answer = await asyncio.to_thread(request, f"{self.url}/cache/stats")
            self._lags.append(answer.json()["loop_lag_s"] or 0.0)

    async def _watch_engines(self) -> None:
        """All of them are one process with one event loop: how long a request that asks for
        nothing takes is how late their steps end."""
        while True:
            await asyncio.sleep(PROBE_INTERVAL_S)
            began = time.perf_counter()
            await asyncio.to_thread(is_healthy, f"{self.engine_urls[0]}/health")
            self._lates.append(time.perf_counter() - began)

    async def busy_s(self) -> dict[str, float]:
        """Simulated seconds that each engine has computed; empty where they do not say."""
        result: dict[str, float] = {}
        for url in self.engine_urls:
            answer = await asyncio.to_thread(request, f"{url}/metrics")
            if found := _BUSY.search(answer.body.decode()):
                result[url] = float(found[1])
        return result

    def cpu_s(self) -> tuple[float, float, float]:
        """Of the gateway, the engines and this process so far."""
        return cpu_s(self.gateway_pid), cpu_s(self.engines_pid), time.process_time()

    async def reading(
        self, before: tuple[float, float, float], seconds: float, late_p99_s: float
    ) -> Reading:
        """After `seconds` of real time; `before`: what cpu_s said at its begin."""
        await self.note_lag()
        used = [(now - then) / seconds for now, then in zip(self.cpu_s(), before, strict=True)]
        lates = sorted(self._lates)
        return Reading(
            await self.busy_s(),
            Harness(
                gateway_cpu=used[0],
                engines_cpu=used[1],
                client_cpu=used[2],
                loop_lag_s=max(self._lags, default=None),
                client_late_p99_s=late_p99_s,
                engines_late_p99_s=lates[int(0.99 * (len(lates) - 1))] if lates else None,
            ),
        )


@contextlib.asynccontextmanager
async def running_fleet(plan: FleetPlan, directory: Path) -> AsyncIterator[Fleet]:
    """Engines and gateway, from their start to their end."""
    config = config_of(plan, directory)
    stack = Stack(config, installed_build(), directory / "logs", print)
    async with Children() as children:
        path = str(stack.write_config())
        engines = await _python(children, stack, "engines", *engine_arguments(plan, config))
        gateway = await _python(
            children, stack, "gateway", "gateway.cli", "serve", "--config", path
        )
        urls = tuple(engine.url for engine in config.engines)
        url = f"http://{config.listen}"
        await engines.ready(_healthy(f"{urls[-1]}/health"), timeout_s=READY_S)
        await gateway.ready(_healthy(f"{url}/readyz"), timeout_s=READY_S)
        yield Fleet(
            url,
            config.model.name,
            urls,
            only_child_of(gateway.pid),
            only_child_of(engines.pid),
        )


def config_of(plan: FleetPlan, directory: Path) -> HeadstartConfig:
    """Of the gateway. Its times are real ones: what would be a large part of an accelerated run is
    shorter than its default."""
    own, *ports = free_ports(1 + NUM_REPLICAS)
    engines = [
        {"id": f"engine-{i}", "url": f"http://127.0.0.1:{port}", "block_size": WIRE_BLOCK_TOKENS}
        for i, port in enumerate(ports)
    ]
    config = HeadstartConfig.model_validate(
        {
            "listen": f"127.0.0.1:{own}",
            "model": {"max_model_len": plan.max_model_len},
            "engines": engines,
            "store": None,
            "routing": plan.routing,
            "fleet": {
                "health": {"interval": HEALTH_INTERVAL_S, "slow_start": 0.0},
                "coalescing": {
                    "min_tokens": BLOCK_TOKENS // TOKENS_PER_WIRE_TOKEN,
                    "max_wait": CoalescingConfig().max_wait / plan.speed,
                },
            },
            "limits": {
                "max_concurrent_requests": 4096,
                "max_waiting_requests": 4096,
                "max_wait": 600.0,
            },
            "runtime_dir": str(directory),
        }
    )
    return with_model(config)


def free_ports(count: int) -> list[int]:
    """Different ones, where nobody listens now."""
    with contextlib.ExitStack() as probes:
        ports = []
        for _ in range(count):
            probe = probes.enter_context(socket.socket())
            probe.bind(("127.0.0.1", 0))
            ports.append(int(probe.getsockname()[1]))
        return ports


def engine_arguments(plan: FleetPlan, config: HeadstartConfig) -> tuple[str, ...]:
    """Of the process with all simulated engines. Its sockets are where the gateway looks."""
    ports = ",".join(engine.url.rpartition(":")[2] for engine in config.engines)
    root = config.runtime_dir
    return (
        *("engine_adapter.simulated", "--ports", ports, "--model", config.model.name),
        *("--speed", str(plan.speed), "--block-size", str(WIRE_BLOCK_TOKENS)),
        *("--tokens-per-wire-token", str(TOKENS_PER_WIRE_TOKEN)),
        *("--kv-tokens", str(plan.blocks_per_replica * BLOCK_TOKENS)),
        *("--max-model-len", str(plan.max_model_len)),
        *("--events", f"ipc://{root}/engine-{{index}}-events.sock"),
        *("--replay", f"ipc://{root}/engine-{{index}}-replay.sock"),
    )


async def _python(children: Children, stack: Stack, name: str, *arguments: str) -> Child:
    log = stack.log_dir / f"{name}.log"
    return await children.start(ChildSpec(name, (sys.executable, "-m", *arguments), log))


def _healthy(url: str) -> Any:
    return lambda: asyncio.to_thread(is_healthy, url)

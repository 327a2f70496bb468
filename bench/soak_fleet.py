"""The processes of bench.soak: a gateway with many tenants before engines of two kinds: simulated
ones, with caches and KV events, and instant ones (bench/instant_engine.py) without, which get most
of the traffic because they are faster."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.overhead_runs import only_child_of
from bench.routing_fleet import free_ports
from engine_adapter.vllm_build import installed_build
from gateway.cli.common import with_model
from gateway.local.children import Child, Children, ChildSpec
from gateway.local.local_http import is_healthy
from gateway.local.stack import Stack
from policies.config import HeadstartConfig

NUM_SIMULATED = 2
NUM_INSTANT = 2
NUM_SPARE = 2
"""Simulated ones that are not in the configuration: they are added and removed."""
NUM_TENANTS = 50
SPEED = 1000.0
KV_TOKENS = 20_000
"""Of each engine: it evicts all the time."""
MAX_MODEL_LEN = 2048
READY_S = 60.0


@dataclass(frozen=True, slots=True)
class SoakFleet:
    """It runs."""

    url: str
    model: str
    keys: tuple[str, ...]
    """API keys of the tenants, one each."""
    simulated: tuple[dict[str, Any], ...]
    """As in the configuration."""
    spare: tuple[dict[str, Any], ...]
    gateway_pid: int


@contextlib.asynccontextmanager
async def running_soak_fleet(directory: Path) -> AsyncIterator[SoakFleet]:
    """Engines and gateway, from their start to their end."""
    own, *ports = free_ports(1 + NUM_SIMULATED + NUM_SPARE + NUM_INSTANT)
    simulated_ports, instant_ports = ports[:-NUM_INSTANT], ports[-NUM_INSTANT:]
    simulated = [_simulated(i, port, directory) for i, port in enumerate(simulated_ports)]
    instant = [_instant(i, port) for i, port in enumerate(instant_ports)]
    config = _config(own, [*simulated[:NUM_SIMULATED], *instant], directory)
    stack = Stack(config, installed_build(), directory / "logs", print)
    async with Children() as children:
        await _python(children, stack, "engines", *_arguments(config, simulated_ports, directory))
        for port in instant_ports:
            await _python(
                children, stack, f"instant-{port}", "bench.instant_engine", "--port", str(port)
            )
        path = str(stack.write_config())
        gateway = await _python(
            children, stack, "gateway", "gateway.cli", "serve", "--config", path
        )
        url = f"http://{config.listen}"
        for each in (*simulated, *instant):
            await gateway.ready(_healthy(f"{each['url']}/health"), timeout_s=READY_S)
        await gateway.ready(_healthy(f"{url}/readyz"), timeout_s=READY_S)
        yield SoakFleet(
            url=url,
            model=config.model.name,
            keys=tuple(_key(name) for name in config.tenants),
            simulated=tuple(simulated[:NUM_SIMULATED]),
            spare=tuple(simulated[NUM_SIMULATED:]),
            gateway_pid=only_child_of(gateway.pid),
        )


def _simulated(number: int, port: int, directory: Path) -> dict[str, Any]:
    return {
        "id": f"simulated-{number}",
        "url": f"http://127.0.0.1:{port}",
        "block_size": 16,
        "events": f"ipc://{directory}/simulated-{number}-events.sock",
        "events_replay": f"ipc://{directory}/simulated-{number}-replay.sock",
    }


def _instant(number: int, port: int) -> dict[str, Any]:
    return {
        "id": f"instant-{number}",
        "url": f"http://127.0.0.1:{port}",
        "block_size": 16,
        "report_events": False,
    }


def _arguments(config: HeadstartConfig, ports: list[int], directory: Path) -> tuple[str, ...]:
    """Of the process with all simulated engines."""
    return (
        *("engine_adapter.simulated", "--model", config.model.name),
        *("--ports", ",".join(map(str, ports)), "--speed", str(SPEED)),
        *("--kv-tokens", str(KV_TOKENS), "--max-model-len", str(MAX_MODEL_LEN)),
        *("--events", f"ipc://{directory}/simulated-{{index}}-events.sock"),
        *("--replay", f"ipc://{directory}/simulated-{{index}}-replay.sock"),
        *("--replay-bytes", str(2**20)),
    )


async def _python(children: Children, stack: Stack, name: str, *arguments: str) -> Child:
    log = stack.log_dir / f"{name}.log"
    return await children.start(ChildSpec(name, (sys.executable, "-m", *arguments), log))


def _config(port: int, engines: list[dict[str, Any]], directory: Path) -> HeadstartConfig:
    secret = directory / "salt-secret"
    secret.write_text("a secret of this soak alone\n")
    secret.chmod(0o600)
    tenants = {}
    for i in range(NUM_TENANTS):
        file = directory / f"tenant-{i}"
        file.write_text(_key(f"tenant-{i}") + "\n")
        file.chmod(0o600)
        tenants[f"tenant-{i}"] = {"key_file": str(file)}
    config = HeadstartConfig.model_validate(
        {
            "listen": f"127.0.0.1:{port}",
            "model": {"max_model_len": MAX_MODEL_LEN},
            "engines": engines,
            "store": None,
            "tenants": tenants,
            "salt_secret_file": str(secret),
            "limits": {"index_memory": "16MiB", "memo_memory": "4MiB"},
            "fleet": {
                "health": {"slow_start": 0.0},
                "approximate": {"max_tokens": KV_TOKENS, "expiry": 30.0},
            },
            "runtime_dir": str(directory),
        }
    )
    return with_model(config)


def _key(tenant: str) -> str:
    return f"sk-soak-{tenant}"


def _healthy(url: str) -> Any:
    return lambda: asyncio.to_thread(is_healthy, url)

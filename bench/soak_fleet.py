"""The processes of bench.soak: a gateway with many tenants before simulated engines."""

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
from gateway.local.children import Children, ChildSpec
from gateway.local.local_http import is_healthy
from gateway.local.stack import Stack
from policies.config import HeadstartConfig

NUM_REPLICAS = 4
NUM_SPARE = 2
"""Engines that run but are not in the configuration: they are added and removed."""
NUM_TENANTS = 50
SPEED = 1000.0
KV_TOKENS = 40_000
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
    engines: tuple[dict[str, Any], ...]
    """As in the configuration."""
    spare: tuple[dict[str, Any], ...]
    gateway_pid: int


@contextlib.asynccontextmanager
async def running_soak_fleet(directory: Path) -> AsyncIterator[SoakFleet]:
    """Engines and gateway, from their start to their end."""
    own, *ports = free_ports(1 + NUM_REPLICAS + NUM_SPARE)
    engines = [
        {"id": f"engine-{i}", "url": f"http://127.0.0.1:{port}", "block_size": 16,
         "events": f"ipc://{directory}/engine-{i}-events.sock",
         "events_replay": f"ipc://{directory}/engine-{i}-replay.sock"}
        for i, port in enumerate(ports)
    ]  # fmt: skip
    config = _config(own, engines[:NUM_REPLICAS], directory)
    stack = Stack(config, installed_build(), directory / "logs", print)
    async with Children() as children:
        argv = (
            *(sys.executable, "-m", "engine_adapter.simulated", "--model", config.model.name),
            *("--ports", ",".join(map(str, ports)), "--speed", str(SPEED)),
            *("--kv-tokens", str(KV_TOKENS), "--max-model-len", str(MAX_MODEL_LEN)),
            *("--events", f"ipc://{directory}/engine-{{index}}-events.sock"),
            *("--replay", f"ipc://{directory}/engine-{{index}}-replay.sock"),
            *("--replay-bytes", str(2**20)),
        )
        spec = ChildSpec("engines", argv, stack.log_dir / "engines.log")
        simulated = await children.start(spec)
        await simulated.ready(_healthy(f"{engines[-1]['url']}/health"), timeout_s=READY_S)
        serve = (sys.executable, "-m", "gateway.cli", "serve", "--config")
        spec = ChildSpec(
            "gateway", (*serve, str(stack.write_config())), stack.log_dir / "gateway.log"
        )
        gateway = await children.start(spec)
        url = f"http://{config.listen}"
        await gateway.ready(_healthy(f"{url}/readyz"), timeout_s=READY_S)
        yield SoakFleet(
            url=url,
            model=config.model.name,
            keys=tuple(_key(name) for name in config.tenants),
            engines=tuple(engines[:NUM_REPLICAS]),
            spare=tuple(engines[NUM_REPLICAS:]),
            gateway_pid=only_child_of(gateway.pid),
        )


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
            "fleet": {"health": {"slow_start": 0.0}},
            "runtime_dir": str(directory),
        }
    )
    return with_model(config)


def _key(tenant: str) -> str:
    return f"sk-soak-{tenant}"


def _healthy(url: str) -> Any:
    return lambda: asyncio.to_thread(is_healthy, url)

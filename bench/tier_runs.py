"""The course of `bench.tiers`: one engine, and one store after another on the same blocks."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.disk_io import drop_from_cache
from bench.redis_for_bench import RedisServer, SlowProxy
from bench.tier_speed import Speed, speed_of_disk, speed_of_redis
from bench.ttft import SEED, Run, ask
from engine_adapter.launcher import LaunchOptions, build_command
from gateway.local.children import Child, Children, ChildSpec
from gateway.local.local_http import request
from gateway.local.stack import Stack
from policies.config import StoreConfig
from prefix_store.client import StoreClient
from prefix_store.protocol import StoreStats, TierStats

NUM_TOKENS = 2000
SLOW_BYTES_S = 5e6
SETTLED_S = 60.0
WARM_UP = (40, 600, 2100)


@dataclass(slots=True)
class Results:
    """All requests by kind, in the order in which they were sent."""

    runs: dict[str, list[Run]] = field(default_factory=dict)
    tiers: dict[str, TierStats] = field(default_factory=dict)
    """As the store sees them after the runs of that kind."""
    speeds: dict[str, Speed] = field(default_factory=dict)


class TiersBench:
    """Each prompt is computed once and then loaded from everywhere, while nothing else has it."""

    def __init__(
        self,
        stack: Stack,
        redis: RedisServer,
        proxy: SlowProxy,
        directory: Path,
        *,
        num_runs: int,
        console: Console,
    ) -> None:
        self._stack = stack
        self._engine = stack.config.engines[0]
        self._redis, self._proxy, self._directory = redis, proxy, directory
        self._console = console
        self._chooser = random.Random(SEED)
        self._prompts = [self._new_prompt() for _ in range(num_runs)]
        self._results = Results()
        self._children = Children()
        self._store: Child | None = None

    @property
    def full_block_tokens(self) -> int:
        """What a hit can deliver of each prompt."""
        return (NUM_TOKENS - 1) // self._engine.block_size * self._engine.block_size

    async def run(self) -> Results:
        async with self._children:
            await self._fill()
            await self._phase("memory", None)
            disk = {"path": str(self._directory), "capacity": "8GiB"}
            await self._phase("disk", {"disk": disk})
            await self._phase("disk, not cached", {"disk": disk}, drop=True)
            await self._phase("redis", {"redis": self._redis_keys(self._redis.url)})
            await self._slow()
            await self._stop_store()
            await self._measure_speeds()
        return self._results

    def _redis_keys(self, url: str) -> dict[str, Any]:
        return {"url": url, "capacity": "8GiB", "timeout": 0.25}

    async def _fill(self) -> None:
        """Every prompt cold, then from the engine's cache; the store writes to all tiers."""
        lower = {
            "disk": {"path": str(self._directory), "capacity": "8GiB", "write": "on_save"},
            "redis": {**self._redis_keys(self._redis.url), "write": "on_save"},
        }
        await self._start_store(lower)
        self._console.print("starting vLLM")
        options = LaunchOptions(dev_mode=True)
        stack = self._stack
        model_dir = Path(stack.config.model.path or "")
        command = build_command(
            stack.config, self._engine, stack.paths, model_dir, stack.build.platform,
            options=options,
        )  # fmt: skip
        spec = ChildSpec("engine", command.argv, stack.log_dir / "engine.log", env=command.env)
        await stack.engine_ready(await self._children.start(spec), self._engine)
        await self._until(lambda stats: len(stats.connectors) > 1)
        await self._warm_up()
        self._console.print("cold, and from the engine's own cache")
        for prompt in self._prompts:
            await self._ask("cold", prompt)
            await self._ask("engine", prompt)
        blocks = len(self._prompts) * (NUM_TOKENS // self._engine.block_size)
        await self._until(lambda stats: all(tier.blocks >= blocks for tier in stats.tiers))

    async def _phase(self, kind: str, lower: dict[str, Any] | None, *, drop: bool = False) -> None:
        """Every prompt from one tier, after a restart with empty memory; None: as it is."""
        self._console.print(f"from {kind}")
        if lower is not None:
            await self._start_store(lower)
            await self._warm_up()
        if drop:
            for file in self._directory.rglob("*"):
                if file.is_file():
                    await asyncio.to_thread(drop_from_cache, file)
        await self._forget_device()
        for prompt in self._prompts:
            await self._ask(kind, prompt)
        for tier in (await self._stats()).tiers:
            if tier.name in kind:
                self._results.tiers[kind] = tier

    async def _slow(self) -> None:
        """The loading policy before a Redis that is slow from the start, and unknown; requests for
        what lies there alternate with new ones, so both see the same machine."""
        self._console.print("with Redis slowed to 5 MB/s")
        self._proxy.bytes_per_s = SLOW_BYTES_S
        keys = {"redis": self._redis_keys(self._proxy.url)}
        await self._start_store({**keys, "loading": {"kind": "faster_than_recompute"}})
        await self._warm_up()
        await self._forget_device()
        for prompt in self._prompts:
            await self._ask("cold, slow redis there", self._new_prompt())
            await self._ask("slow redis", prompt)
        self._results.tiers["slow redis"] = (await self._stats()).tiers[0]

    async def _measure_speeds(self) -> None:
        self._console.print("the media by themselves")
        speeds = self._results.speeds
        speeds["disk"], blocks = await speed_of_disk(self._directory)
        for file in self._directory.rglob("*"):
            if file.is_file():
                await asyncio.to_thread(drop_from_cache, file)
        speeds["disk, not cached"], _ = await speed_of_disk(self._directory)
        speeds["redis"] = await speed_of_redis(self._redis.url, blocks)

    async def _start_store(self, keys: dict[str, Any]) -> None:
        await self._stop_store()
        store = StoreConfig.model_validate(
            {"memory": {"capacity": "2GiB"}, "loading": {"kind": "always"}, **keys}
        )
        self._stack.config = self._stack.config.model_copy(update={"store": store})
        self._store = await self._stack.start_store(self._children)
        if len(self._results.runs):  # the engine runs
            await self._until(lambda stats: len(stats.connectors) > 1)

    async def _stop_store(self) -> None:
        if self._store is not None:
            await self._children.stop(self._store)
            self._store = None

    async def _warm_up(self) -> None:
        """The first passes after a start are slower, and the store learns what prefill costs."""
        for length in WARM_UP:
            await asyncio.to_thread(
                ask, self._engine.url, self._stack.config.model.name, self._new_prompt(length)
            )

    async def _ask(self, kind: str, prompt: list[int]) -> None:
        run = await asyncio.to_thread(ask, self._engine.url, self._stack.config.model.name, prompt)
        self._results.runs.setdefault(kind, []).append(run)

    async def _forget_device(self) -> None:
        url = f"{self._engine.url}/reset_prefix_cache"
        answer = await asyncio.to_thread(request, url, {}, timeout_s=30.0)
        if answer.status >= 400:
            raise SystemExit(f"bench: {url} answered {answer.status}")

    def _new_prompt(self, length: int = NUM_TOKENS) -> list[int]:
        return [self._chooser.randrange(300, 40_000) for _ in range(length)]

    async def _stats(self) -> StoreStats:
        return await asyncio.to_thread(
            read_stats, self._stack.paths.store_socket(self._stack.config)
        )

    async def _until(self, condition: Any) -> None:
        deadline = time.monotonic() + SETTLED_S
        while not condition(stats := await self._stats()):
            if time.monotonic() > deadline:
                raise SystemExit(f"bench: the store does not get there: {stats}")
            await asyncio.sleep(0.1)


def read_stats(socket: Path) -> StoreStats:
    """Figures of the store at this socket."""
    client = StoreClient.connect(socket, client="bench", timeout_s=5.0)
    try:
        return client.stats()
    finally:
        client.close()

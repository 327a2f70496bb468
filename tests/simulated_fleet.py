"""A gateway or two over simulated engines, all in this process: for what several replicas do and
one machine cannot run as vLLM. Prompts are token ids, so no tokenizer is needed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from engine_adapter.base import Prompt, RenderingError
from engine_adapter.rendering import PromptRenderer
from engine_adapter.simulated.engine import SimulatedEngine, running
from engine_adapter.simulated.options import SimulationOptions
from engine_adapter.simulated.words import HashedWords
from gateway.accounts.stats_schema import CacheStats
from gateway.serve import Gateway
from policies.config import HeadstartConfig
from prefix_store.base import BlockHash
from prefix_store.hashing import as_token_ids, extend_chain

MODEL = "simulated-model"
BLOCK_SIZE = 16


class TokenRenderer:
    """Renders prompts of token ids, and nothing else."""

    async def completion(self, body: Mapping[str, Any], root: BlockHash) -> Prompt:
        prompt = body["prompt"]
        if not isinstance(prompt, list):
            raise RenderingError("only token ids")
        tokens = as_token_ids(prompt)
        return Prompt(len(tokens), extend_chain(root, tokens, BLOCK_SIZE), [tokens])

    async def chat(self, body: Mapping[str, Any], root: BlockHash) -> Prompt:
        raise RenderingError("only token ids")

    def stats(self) -> SimpleNamespace:
        return SimpleNamespace(tokens_from_memo=0, tokens_tokenized=0, memo_bytes=0)

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Asked:
    """An answer, as its client sees it."""

    status: int
    replica: str | None
    route: dict[str, Any] | None
    cached_tokens: int
    body: dict[str, Any]

    @property
    def evidence(self) -> str:
        assert self.route is not None
        return str(self.route["evidence"])

    def device_tokens(self, replica: str) -> int:
        """That the index knew of at a replica."""
        assert self.route is not None
        (found,) = [c for c in self.route["candidates"] if c["replica"] == replica]
        return int(found["device_tokens"])


class SimulatedFleet:
    """Engines r0, r1, ... and gateways; every gateway listens on a port of its own."""

    def __init__(
        self,
        engines: Sequence[SimulatedEngine],
        client: aiohttp.ClientSession,
        stack: AsyncExitStack,
        configs: Iterator[HeadstartConfig],
    ) -> None:
        self.engines = engines
        self.client = client
        self.urls: list[str] = []
        self._stack = stack
        self._configs = configs

    async def add_gateway(self) -> int:
        """One more, which knows nothing yet; its number. It is exact when this returns, unless the
        engines publish no events."""
        config = next(self._configs)
        await _serve(config, self._stack)
        self.urls.append(f"http://{config.listen}")
        gateway = len(self.urls) - 1
        if all(engine.report_events for engine in config.engines):
            await self.exact(gateway)
        return gateway

    async def ask(
        self,
        prompt: Sequence[int],
        *,
        gateway: int = 0,
        max_tokens: int = 2,
        headers: Mapping[str, str] | None = None,
    ) -> Asked:
        """A completion, whole."""
        body = {"model": MODEL, "prompt": list(prompt), "max_tokens": max_tokens}
        explain = {"x-headstart-explain": "1", **(headers or {})}
        url = f"{self.urls[gateway]}/v1/completions"
        async with self.client.post(url, json=body, headers=explain) as response:
            answer = json.loads(await response.read())
            route = response.headers.get("x-headstart-route")
            details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
            return Asked(
                response.status,
                response.headers.get("x-headstart-replica"),
                None if route is None else json.loads(route),
                details.get("cached_tokens") or 0,
                answer,
            )

    async def fault(self, engine: int, kind: str, **more: Any) -> None:
        """See engine_adapter.simulated.faults."""
        url = f"{self.engines[engine].url}/simulate/fault"
        async with self.client.post(url, json={"kind": kind, **more}) as response:
            assert response.status == 200

    async def admin(self, method: str, path: str, *, gateway: int = 0, **more: Any) -> Any:
        """A request to /admin/replicas; its answer's body."""
        url = f"{self.urls[gateway]}/admin/replicas{path}"
        async with self.client.request(method, url, **more) as response:
            raw = await response.read()
            assert response.status < 300, raw
            return json.loads(raw) if raw else None

    async def stats(self, gateway: int = 0) -> CacheStats:
        async with self.client.get(f"{self.urls[gateway]}/cache/stats") as response:
            return CacheStats.model_validate_json(await response.read())

    async def condition(self, replica: str, wanted: str, *, gateway: int = 0) -> None:
        """Until a replica is in a condition."""
        async with asyncio.timeout(20):
            while True:
                state = (await self.stats(gateway)).replicas[replica].state
                if state.condition == wanted:
                    return
                await asyncio.sleep(0.02)

    async def gone(self, replica: str, *, gateway: int = 0) -> None:
        """Until a replica is not there any more."""
        async with asyncio.timeout(20):
            while True:
                if replica not in (await self.stats(gateway)).replicas:
                    return
                await asyncio.sleep(0.02)

    async def exact(self, gateway: int = 0) -> None:
        """Until it is known exactly what every replica holds."""
        async with asyncio.timeout(20):
            while True:
                replicas = (await self.stats(gateway)).replicas
                if all(each.state.evidence == "exact" for each in replicas.values()):
                    return
                await asyncio.sleep(0.02)


@asynccontextmanager
async def open_fleet(
    root: Path,
    count: int = 3,
    *,
    gateways: int = 1,
    ports: Sequence[int],
    engine: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    **config: Any,
) -> AsyncIterator[SimulatedFleet]:
    """`ports`: free ones, for the engines and for all gateways that there will be. `engine`:
    further keys of every engine's configuration; `config`: of the gateways'. `options`: of the
    simulation."""
    engines = [
        SimulatedEngine(
            SimulationOptions(
                **{
                    "model": MODEL,
                    "block_size": BLOCK_SIZE,
                    "speed": 2.0,
                    "events": f"ipc://{root}/e{i}",
                    "replay": f"ipc://{root}/p{i}",
                    **(options or {}),
                }
            ),
            HashedWords(),
            host="127.0.0.1",
            port=ports[i],
        )
        for i in range(count)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PromptRenderer, "load", lambda *_args, **_more: TokenRenderer())
        patch.setenv("XDG_STATE_HOME", str(root / "state"))
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(running(engines))
            client = await stack.enter_async_context(aiohttp.ClientSession())
            configs = (_config(root, engines, port, engine or {}, config) for port in ports[count:])
            fleet = SimulatedFleet(engines, client, stack, configs)
            for _ in range(gateways):
                await fleet.add_gateway()
            yield fleet


def _config(
    root: Path,
    engines: Sequence[SimulatedEngine],
    port: int,
    engine: Mapping[str, Any],
    more: Mapping[str, Any],
) -> HeadstartConfig:
    return HeadstartConfig.model_validate(
        {
            "listen": f"127.0.0.1:{port}",
            "runtime_dir": str(root / f"rt{port}"),
            "model": {"name": MODEL, "path": str(root)},
            "store": None,
            "engines": [
                {
                    "id": f"r{i}",
                    "url": each.url,
                    "block_size": BLOCK_SIZE,
                    "events": f"ipc://{root}/e{i}",
                    "events_replay": f"ipc://{root}/p{i}",
                    **engine,
                }
                for i, each in enumerate(engines)
            ],
            **more,
        }
    )


async def _serve(config: HeadstartConfig, stack: AsyncExitStack) -> None:
    """A gateway in a task of this loop, until the stack is closed."""
    ready = asyncio.Event()

    async def serve() -> None:
        async with AsyncExitStack() as owned:
            await (await Gateway.open(config, owned)).run(ready.set)

    task = asyncio.create_task(serve())

    async def end() -> None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    stack.push_async_callback(end)
    waiting = asyncio.ensure_future(ready.wait())
    await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if task.done():
        task.result()

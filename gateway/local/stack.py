"""The children of an embedded Headstart: the store server and the engines of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine_adapter.engine_log import failure_reason
from engine_adapter.launcher import EngineCommand, build_command, check_launch
from engine_adapter.vllm_build import VllmBuild
from gateway.local.children import Child, Children, ChildSpec, Probe
from gateway.local.keeping import Notice, keep_running
from gateway.local.local_http import is_healthy, request
from policies.config import HeadstartConfig
from policies.engine import EngineConfig
from prefix_store.base import StoreError
from prefix_store.client import StoreClient
from prefix_store.protocol import MAX_REASON_CHARS
from prefix_store.reloading import applicable
from prefix_store.runtime_dir import RuntimePaths

STORE_READY_S = 60.0
ENGINE_READY_S = 600.0
ENGINE_GRACE_S = 15.0
_WARM_UP = list(range(1, 9))
"""Token ids; shorter than a block, so nothing of them stays in any cache."""


@dataclass(slots=True)
class Stack:
    """What is started, from a configuration whose runtime_dir and models' paths are set."""

    config: HeadstartConfig
    build: VllmBuild
    log_dir: Path
    notice: Notice

    @property
    def paths(self) -> RuntimePaths:
        return RuntimePaths.of(self.config)

    def write_config(self) -> Path:
        """The configuration as a file for children (JSON is YAML)."""
        return self._write(self.config)

    def _write(self, config: HeadstartConfig) -> Path:
        self.paths.create()
        path = self.paths.root / "config.json"
        new = path.with_suffix(".new")
        new.unlink(missing_ok=True)
        new.touch(mode=0o600)
        new.write_text(json.dumps(config.model_dump(mode="json"), indent=1), encoding="utf-8")
        new.replace(path)
        return path

    async def hand_to_store(self, config: HeadstartConfig) -> None:
        """Give a changed configuration of the store to the one that runs, which watches its
        file. What needs a restart is named by it; one that died in between starts without that,
        since its clients still go by the old addresses."""
        running = self.config.store
        if running is None or config.store is None:
            self.notice("start Headstart again for: store")
            return
        merged, _ = applicable(running, config.store)
        self.config = self.config.model_copy(update={"store": merged})
        self._write(self.config.model_copy(update={"store": config.store}))

    async def refuse_reload(self, reason: str) -> None:
        """Say that a changed configuration cannot be used, in the log and to the store, whose
        statistics show it."""
        self.notice(f"the configuration is not taken, the old one stays: {reason}")
        with contextlib.suppress(StoreError):
            await asyncio.to_thread(_tell_store, self.paths.store_socket(self.config), reason)

    async def start_store(self, children: Children) -> Child:
        """The store server, once it answers."""
        child = await self._spawn_store(children)
        socket = self.paths.store_socket(self.config)
        await child.ready(_in_thread(lambda: _store_answers(socket)), timeout_s=STORE_READY_S)
        return child

    async def _spawn_store(self, children: Children) -> Child:
        argv = self._headstart("store", "--config", str(self.write_config()))
        return await children.start(ChildSpec("store", argv, self.log_dir / "store.log"))

    def check_engine(self, engine: EngineConfig) -> None:
        """LaunchError for what can be known to be wrong before anything is started."""
        model_dir = self._model_dir(engine)
        check_launch(self._command(engine), self.build, model_dir)

    async def start_engine(self, children: Children, engine: EngineConfig) -> Child:
        """One vLLM; it is not ready yet (see engine_ready)."""
        command = self._command(engine)
        spec = ChildSpec(
            name=f"engine {engine.id}",
            argv=command.argv,
            env=command.env,
            log=self.log_dir / f"{engine.id}.log",
            grace_s=ENGINE_GRACE_S,
            explain=failure_reason,
        )
        return await children.start(spec)

    async def engine_ready(self, child: Child, engine: EngineConfig) -> None:
        """Wait until it answers, and let it make its first pass, which takes longer than any later
        one. ChildError with the reason from its log when it fails."""
        probe = _in_thread(lambda: is_healthy(f"{engine.url}/health"))
        await child.ready(probe, timeout_s=ENGINE_READY_S, interval_s=0.25)
        body = {"model": self.config.model_of(engine).name, "prompt": _WARM_UP, "max_tokens": 2}
        url = f"{engine.url}/v1/completions"
        answer = await asyncio.to_thread(request, url, body, timeout_s=ENGINE_READY_S)
        answer.json()

    async def keep_engine(self, children: Children, child: Child, engine: EngineConfig) -> None:
        """Start it again whenever it ends, later each time that it does not last. Never returns."""
        await keep_running(
            children, child, lambda: self.start_engine(children, engine), self.notice
        )

    async def keep_store(self, children: Children, child: Child) -> None:
        """Likewise. Engines and gateway connect to the new one by themselves."""
        await keep_running(children, child, lambda: self._spawn_store(children), self.notice)

    def _command(self, engine: EngineConfig) -> EngineCommand:
        model_dir = self._model_dir(engine)
        return build_command(self.config, engine, self.paths, model_dir, self.build.platform)

    def _model_dir(self, engine: EngineConfig) -> Path:
        return Path(self.config.model_of(engine).path or "")

    @staticmethod
    def _headstart(*arguments: str) -> tuple[str, ...]:
        return (sys.executable, "-m", "gateway.cli", *arguments)

    def remove_files(self) -> None:
        """What children and we leave in the runtime directory (vLLM leaves its sockets)."""
        endpoints = [self.paths.engine_events(engine) for engine in self.config.engines]
        endpoints += [self.paths.engine_replay(engine) for engine in self.config.engines]
        for endpoint in endpoints:
            if endpoint.startswith("ipc://"):
                Path(endpoint.removeprefix("ipc://")).unlink(missing_ok=True)
        (self.paths.root / "config.json").unlink(missing_ok=True)


def _in_thread(answer: Callable[[], bool]) -> Probe:
    return lambda: asyncio.to_thread(answer)


def _tell_store(socket: Path, reason: str) -> None:
    client = StoreClient.connect(socket, client="gateway")
    try:
        client.reload_refused(reason[:MAX_REASON_CHARS])
    finally:
        client.close()


def _store_answers(socket: Path) -> bool:
    try:
        StoreClient.connect(socket, client="readiness", timeout_s=1.0).close()
    except StoreError:
        return False
    return True

"""The real thing for tests: store, vLLM engine and gateway as processes, the real model."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine_adapter.launcher import LaunchOptions, build_command
from engine_adapter.vllm_build import installed_build
from policies.config import HeadstartConfig
from prefix_store.client import StoreClient
from prefix_store.extents import ALIGNMENT
from prefix_store.record import MAGIC, read_header
from prefix_store.runtime_dir import RuntimePaths

KV_BLOCKS = 320
"""Small, so that tests can fill the engine's cache: 10,240 tokens in blocks of 32."""

ENGINE_READY_S = 180.0

BF16_TOLERANCE = 0.3
"""Largest difference of logprobs between cold and warm. Seen on random tokens: 0.2."""


@dataclass(frozen=True)
class Answer:
    """A completion as the engine gave it."""

    text: str
    token_logprobs: list[float]
    tokens: list[str]
    prompt_tokens: int
    cached_tokens: int
    raw: dict[str, Any]

    @property
    def logprobs(self) -> Any:
        """Chosen tokens and candidates with their logprobs, exactly as the engine wrote them."""
        return self.raw["choices"][0]["logprobs"]

    def head(self, count: int) -> Answer:
        """The first tokens."""
        return replace(self, tokens=self.tokens[:count], token_logprobs=self.token_logprobs[:count])

    def agrees_with(self, other: Answer) -> bool:
        """Within bf16: prefill in another batch shape rounds differently. Up to the first token
        that differs, logprobs are within BF16_TOLERANCE; a token may differ only where the two
        candidates were that close, and then the answers part."""
        for i, (one, two) in enumerate(zip(self.tokens, other.tokens, strict=True)):
            if abs(self.token_logprobs[i] - other.token_logprobs[i]) > BF16_TOLERANCE:
                return False
            if one != two:
                return True
        return True


class LiveStack:
    """Store, engine and gateway of one runtime directory. Each can be killed and started again."""

    def __init__(
        self,
        model_dir: Path,
        engine: Mapping[str, Any] | None = None,
        *,
        runtime_dir: Path | None = None,
    ) -> None:
        """`engine`: more keys of the engine's configuration. `runtime_dir`: unset, its own."""
        self.root = Path(tempfile.mkdtemp(prefix="headstart-test-"))
        self.model_dir = model_dir
        self.engine_port, self.gateway_port = free_ports(2)
        self.config = HeadstartConfig.model_validate(
            {
                "listen": f"127.0.0.1:{self.gateway_port}",
                "runtime_dir": str(runtime_dir or self.root / "rt"),
                "model": {"path": str(model_dir)},
                "engines": [
                    {
                        "url": self.engine_url,
                        "extra_args": [
                            *("--num-gpu-blocks-override", str(KV_BLOCKS)),
                            *("--max-num-batched-tokens", "512"),
                        ],
                        **(engine or {}),
                    }
                ],
                "store": {"memory": {"capacity": "1GiB"}, "lease": 10},
                "salt_secret_file": str(self.root / "secret"),
            }
        )
        (self.root / "secret").write_text("0123456789abcdef0123456789abcdef")
        (self.root / "secret").chmod(0o600)
        self.paths = RuntimePaths.of(self.config)
        self.paths.create()
        self.config_file = self.root / "headstart.yaml"
        self.config_file.write_text(json.dumps(self.config.model_dump(mode="json")))
        self._store_file = self.config_file
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def model(self) -> str:
        return self.config.model.name

    @property
    def engine_url(self) -> str:
        return f"http://127.0.0.1:{self.engine_port}"

    @property
    def gateway_url(self) -> str:
        return f"http://127.0.0.1:{self.gateway_port}"

    @property
    def store_socket(self) -> Path:
        return self.paths.store_socket(self.config)

    def pid(self, name: str) -> int:
        """Of the store, the engine or the gateway."""
        return self._processes[name].pid

    def log(self, name: str) -> str:
        return (self.root / f"{name}.log").read_text(errors="replace")

    def start_store(self) -> None:
        config = ["--config", str(self._store_file)]
        self._start("store", [sys.executable, "-m", "gateway.cli", "store", *config])
        self._await("store", 30, self._store_answers)

    def start_engine(self) -> None:
        """Start and wait until it is warm."""
        self.launch_engine()
        self.await_engine()

    def launch_engine(self) -> None:
        """Start its process."""
        engine = self.config.engines[0]
        build = installed_build()
        options = LaunchOptions(dev_mode=True)
        command = build_command(
            self.config, engine, self.paths, self.model_dir, build.platform, options=options
        )
        self._start("engine", list(command.argv), dict(command.env))

    def await_engine(self) -> None:
        """Until it answers and is warm: the first forward pass is not representative."""
        self._await("engine", ENGINE_READY_S, lambda: self._healthy(f"{self.engine_url}/health"))
        self.complete([1, 2, 3, 4, 5], max_tokens=2)

    def start_gateway(self) -> None:
        self._start("gateway", [sys.executable, "-m", "gateway.cli", "serve", *self._config_args()])
        self._await("gateway", 60, lambda: self._healthy(f"{self.gateway_url}/readyz"))

    def restart_store(self) -> None:
        self.stop("store")
        self.start_store()
        self.await_connector()

    def use_store(self, **keys: Any) -> None:
        """A new, empty store with other keys than the usual ones (none: the usual store). Engine
        and gateway stay and find it."""
        self.stop("store")
        self._store_file = self.config_file
        if keys:
            config = self.config.model_dump(mode="json")
            config["store"] |= keys
            self._store_file = self.root / "store.json"
            self._store_file.write_text(json.dumps(config))
        self.start_store()
        self.await_connector()

    def await_connector(self) -> None:
        """Until both halves of the engine's connector have found the store."""
        engine = self.config.engines[0].id
        halves = {f"{engine}/scheduler", f"{engine}/worker"}
        with self.store() as store:
            self._await("engine", 30, lambda: halves <= set(store.stats().connectors))

    def signal(self, name: str, number: signal.Signals) -> None:
        """To the whole process group of the store, the engine or the gateway."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._processes[name].pid, number)

    def kill(self, name: str) -> None:
        """kill -9, and wait until it is gone."""
        self.signal(name, signal.SIGKILL)
        self._processes.pop(name).wait()

    def stop(self, name: str) -> None:
        """Ask it to end; kill it when it does not."""
        process = self._processes.pop(name, None)
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGCONT)
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def close(self) -> None:
        for name in ("gateway", "engine", "store"):
            self.stop(name)
        shutil.rmtree(self.root)

    @contextlib.contextmanager
    def store(self) -> Iterator[StoreClient]:
        """A client of the store, with the arena mapped."""
        client = StoreClient.connect(self.store_socket, client="test", timeout_s=10)
        try:
            yield client
        finally:
            client.close()

    def records(self, store: StoreClient) -> Iterator[memoryview]:
        """Every record in the arena, visible or not, found by its magic where records may start."""
        words = np.frombuffer(store.arena.view, dtype="<u8")
        magic = int.from_bytes(MAGIC, "little")
        for at in np.flatnonzero(words[:: ALIGNMENT // 8] == magic):
            record = store.arena.view[int(at) * ALIGNMENT :]
            if read_header(record) is not None:
                yield record

    def complete(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int = 8,
        url: str | None = None,
        timeout_s: float = 240,
        **extra: Any,
    ) -> Answer:
        """A greedy completion with logprobs, straight from the engine unless `url` is given."""
        body = {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "logprobs": 5,
            "ignore_eos": True,
            **extra,
        }
        data = self.post(f"{url or self.engine_url}/v1/completions", body, timeout_s)
        choice, usage = data["choices"][0], data["usage"]
        details = usage.get("prompt_tokens_details") or {}
        return Answer(
            choice["text"],
            choice["logprobs"]["token_logprobs"],
            choice["logprobs"]["tokens"],
            usage["prompt_tokens"],
            details.get("cached_tokens") or 0,
            data,
        )

    def post(self, url: str, body: dict[str, Any], timeout_s: float = 240) -> dict[str, Any]:
        request = urllib.request.Request(
            url, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            answer: dict[str, Any] = json.load(response)
            return answer

    def forget_device(self) -> None:
        """Empty the engine's own prefix cache; the store keeps what it has."""
        request = urllib.request.Request(f"{self.engine_url}/reset_prefix_cache", method="POST")
        urllib.request.urlopen(request, timeout=30).close()

    def metric(self, name: str) -> float:
        """Sum of an engine metric over its labels."""
        with urllib.request.urlopen(f"{self.engine_url}/metrics", timeout=30) as response:
            lines = response.read().decode().splitlines()
        rows = [line for line in lines if line.startswith((f"{name}{{", f"{name} "))]
        return sum(float(row.rpartition(" ")[2]) for row in rows)

    def _config_args(self) -> list[str]:
        return ["--config", str(self.config_file)]

    def _start(self, name: str, argv: list[str], env: dict[str, str] | None = None) -> None:
        with (self.root / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                argv,
                env={**os.environ, **(env or {})},
                cwd=self.root,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _await(self, name: str, seconds: float, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            process = self._processes.get(name)
            ended = process is not None and process.poll() is not None
            if ended or time.monotonic() > deadline:
                pytest.fail(f"{name} is not ready:\n{self.log(name)[-6000:]}")
            time.sleep(0.1)

    def _store_answers(self) -> bool:
        try:
            StoreClient.connect(self.store_socket).close()
        except Exception:  # noqa: BLE001 (whatever it is, it is not ready)
            return False
        return True

    def _healthy(self, url: str) -> bool:
        try:
            urllib.request.urlopen(url, timeout=5).close()
        except (OSError, http.client.HTTPException):
            return False
        return True


def free_ports(count: int) -> list[int]:
    """Ports on loopback that nobody listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports

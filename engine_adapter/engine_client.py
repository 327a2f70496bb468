"""HTTP to one engine: a pool of kept connections, and errors that say whose fault it was."""

from __future__ import annotations

import errno
import io
import time
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from types import TracebackType

import aiohttp
from yarl import URL

from engine_adapter.base import (
    EngineAdapterError,
    EngineLostError,
    EngineRefusedError,
    EngineTimeoutError,
    EngineUnreachableError,
)

_KEEPALIVE_S = 3.0
"""vLLM's HTTP server closes idle connections after 5 s; we close ours first, so that no request is
sent into a connection that is just being closed."""

_PROBES = 16
"""Connections beside those of completions, for probes and lists of models."""

_AVOID_S = 5.0

_LARGE_BODY_BYTES = 256 * 1024
"""Larger bodies are written piece by piece, which lets the event loop breathe."""

_NOT_BY_ITSELF = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")
"""Headers that aiohttp must not make up. No Accept-Encoding: answers come uncompressed."""


@dataclass(frozen=True, slots=True)
class EngineAnswer:
    """A whole answer."""

    status: int
    body: bytes


class EngineResponse:
    """An answer whose head is here and whose body is still coming."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status = response.status
        self.headers = response.headers

    @property
    def begun(self) -> bool:
        """The first piece of the body is here, or was."""
        return self._response.content.total_bytes > 0

    @property
    def complete(self) -> bool:
        """All of the body has been read."""
        return self._response.content.at_eof()

    async def next_chunk(self) -> bytes:
        """The next piece, as it arrives; empty at the end. Raises EngineLostError."""
        try:
            return await self._response.content.readany()
        except _FAILURES as error:
            raise _translated(error) from error

    async def read(self, max_bytes: int) -> bytes:
        """The whole body; raises EngineLostError when it breaks off or is over `max_bytes`."""
        parts: list[bytes] = []
        size = 0
        while chunk := await self.next_chunk():
            size += len(chunk)
            if size > max_bytes:
                raise EngineLostError(f"the engine's answer is over {max_bytes} bytes")
            parts.append(chunk)
        return parts[0] if len(parts) == 1 else b"".join(parts)


class EngineRequest:
    """A request on its way: an asynchronous context manager."""

    def __init__(
        self, client: EngineClient, sending: AbstractAsyncContextManager[aiohttp.ClientResponse]
    ) -> None:
        self._client = client
        self._sending = sending

    async def __aenter__(self) -> EngineResponse:
        self._client.in_flight += 1
        try:
            return EngineResponse(await self._sending.__aenter__())
        except BaseException as error:
            self._client.in_flight -= 1
            if isinstance(error, _FAILURES):
                translated = _translated(error)
                if isinstance(translated, EngineUnreachableError):
                    self._client.unreachable_at = time.monotonic()
                raise translated from error
            raise

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._client.in_flight -= 1
        await self._sending.__aexit__(kind, error, traceback)


class EngineClient:
    """One engine. Owned by whoever opened it: close it at the end."""

    def __init__(self, url: str, *, max_requests: int, connect_timeout_s: float) -> None:
        """To be called on the event loop. `url` has no trailing slash."""
        self.url = url
        self.in_flight = 0
        """Requests that it works on now."""
        self.unreachable_at = float("-inf")
        """When it could not be reached the last time; of time.monotonic()."""
        self._urls: dict[str, URL] = {}
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=max_requests + _PROBES, keepalive_timeout=_KEEPALIVE_S
            ),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=_NOT_BY_ITSELF,
        )

    @property
    def unreachable(self) -> bool:
        """It could not be reached just now: others are asked first, for a few seconds."""
        return time.monotonic() - self.unreachable_at < _AVOID_S

    async def close(self) -> None:
        """Drop all connections."""
        await self._session.close()

    def request(
        self,
        method: str,
        path: str,
        *,
        headers: Mapping[str, str],
        body: bytes | None = None,
    ) -> EngineRequest:
        """A request, sent by `async with`; inside the block the answer's head is here.

        Leaving the block before the body's end closes the connection, upon which the engine aborts
        its work. `path` is one of a few fixed ones. Raises EngineUnreachableError, EngineLostError.
        """
        data = io.BytesIO(body) if body and len(body) > _LARGE_BODY_BYTES else body
        sending = self._session.request(
            method, self._url(path), data=data, headers=headers, allow_redirects=False
        )
        return EngineRequest(self, sending)

    async def get(self, path: str, *, timeout_s: float, max_bytes: int) -> EngineAnswer:
        """A probe: the whole answer to a GET, whatever its status, within `timeout_s`.

        Raises EngineUnreachableError, EngineTimeoutError, EngineLostError.
        """
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._session.get(
                self._url(path), timeout=timeout, allow_redirects=False
            ) as response:
                body = await EngineResponse(response).read(max_bytes)
                return EngineAnswer(response.status, body)
        except _FAILURES as error:
            raise _translated(error) from error

    async def healthy(self, timeout_s: float) -> bool:
        """True when the engine answers /health with 200 within `timeout_s`."""
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._session.get(self._url("/health"), timeout=timeout) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    def _url(self, path: str) -> URL:
        if path not in self._urls:
            self._urls[path] = URL(self.url + path, encoded=True)
        return self._urls[path]


_FAILURES = (aiohttp.ClientError, TimeoutError, OSError)


def _translated(error: BaseException) -> EngineAdapterError:
    """aiohttp's errors in this package's words."""
    text = str(error) or type(error).__name__
    if isinstance(error, aiohttp.ClientConnectorError) and _refused(error.os_error):
        return EngineRefusedError(text)
    if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
        return EngineUnreachableError(text)
    if isinstance(error, TimeoutError):
        return EngineTimeoutError(text)
    return EngineLostError(text)


def _refused(error: OSError) -> bool:
    """Where a name has several addresses, each of them refused."""
    return error.errno == errno.ECONNREFUSED

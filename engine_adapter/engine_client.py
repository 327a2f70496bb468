"""HTTP to one engine: a pool of kept connections, and errors that say whose fault it was."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager

import aiohttp
from yarl import URL

from engine_adapter.base import (
    EngineLostError,
    EngineTimeoutError,
    EngineUnreachableError,
)

_KEEPALIVE_S = 3.0
"""vLLM's HTTP server closes idle connections after 5 s; we close ours first, so that no request is
sent into a connection that is just being closed."""

_PROBES = 16
"""Connections beside those of completions, for probes and lists of models."""

_LARGE_BODY_BYTES = 256 * 1024
"""Larger bodies are written piece by piece, which lets the event loop breathe."""

_NOT_BY_ITSELF = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")
"""Headers that aiohttp must not make up. No Accept-Encoding: answers come uncompressed."""


class EngineResponse:
    """An answer whose head is here and whose body is still coming."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status = response.status
        self.headers = response.headers

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it arrives; raises EngineLostError when the engine breaks off."""
        content = self._response.content
        while True:
            with _translated():
                chunk = await content.readany()
            if not chunk:
                return
            yield chunk

    async def read(self, max_bytes: int) -> bytes:
        """The whole body; raises EngineLostError when it breaks off or is over `max_bytes`."""
        parts: list[bytes] = []
        size = 0
        async for chunk in self.chunks():
            size += len(chunk)
            if size > max_bytes:
                raise EngineLostError(f"the engine's answer is over {max_bytes} bytes")
            parts.append(chunk)
        return parts[0] if len(parts) == 1 else b"".join(parts)


class EngineClient:
    """One engine. Owned by whoever opened it: close it at the end."""

    def __init__(self, url: str, *, max_requests: int, connect_timeout_s: float) -> None:
        """To be called on the event loop. `url` has no trailing slash."""
        self.url = url
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

    async def close(self) -> None:
        """Drop all connections."""
        await self._session.close()

    @asynccontextmanager
    async def request(
        self,
        method: str,
        path: str,
        *,
        headers: Mapping[str, str],
        body: bytes | None = None,
    ) -> AsyncIterator[EngineResponse]:
        """Send a request; inside the block the answer's head is here.

        Leaving the block before the body's end closes the connection, upon which the engine aborts
        its work. `path` is one of a few fixed ones. Raises EngineUnreachableError, EngineLostError.
        """
        data = io.BytesIO(body) if body and len(body) > _LARGE_BODY_BYTES else body
        with _translated():
            response = await self._session.request(
                method, self._url(path), data=data, headers=headers, allow_redirects=False
            )
        async with response:
            yield EngineResponse(response)

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


@contextmanager
def _translated() -> Iterator[None]:
    """aiohttp's errors in this package's words."""
    try:
        yield
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        raise EngineUnreachableError(str(error)) from error
    except (aiohttp.ServerTimeoutError, TimeoutError) as error:
        raise EngineTimeoutError(str(error)) from error
    except (aiohttp.ClientError, OSError) as error:
        raise EngineLostError(str(error) or type(error).__name__) from error

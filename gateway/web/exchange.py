"""One HTTP request and its answer, at the client's side."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from aiohttp import StreamReader, web
from multidict import CIMultiDict

from gateway.web.body_memory import BodyShare
from gateway.web.errors import (
    BadRequestError,
    BodyTooLargeError,
    GatewayError,
    MethodNotAllowedError,
    RequestTimeoutError,
    encode_error,
    encode_event,
)
from gateway.web.http_headers import REQUEST_ID, request_id_of

JSON = "application/json"
EVENT_STREAM = "text/event-stream"
_LAST_WORD_S = 1.0
"""How long a client that does not read may delay the last event of a broken stream."""


class _HeldHead(web.StreamResponse):
    """A stream whose head leaves together with its first piece."""

    _send_headers_immediately = False  # aiohttp's own switch; without it there are two writes


class Exchange:
    """A request and the one answer to it, whole or as a stream.

    Every answer carries the request id. Writing raises ConnectionError when the client has gone.
    """

    def __init__(self, request: web.BaseRequest, *, last: bool = False) -> None:
        """`last`: the connection is closed after the answer, and the answer says so."""
        self.request = request
        self._last = last
        self.request_id = request_id_of(request.headers)
        self.path_parameters: Mapping[str, str] = {}
        """What stands in the path where its route has names in braces; decoded."""
        self._response: web.StreamResponse | None = None
        self._streaming = False
        self.writing = False
        """An answer or a piece of it is waiting for the client to read."""

    @property
    def started(self) -> bool:
        """The answer's head is on its way: the status cannot be changed any more."""
        return self._response is not None

    async def read_body(self, max_bytes: int, timeout_s: float, share: BodyShare) -> bytes:
        """The body, which takes its `share` of memory.

        Raises BodyTooLargeError, RequestTimeoutError, TooManyRequestsError, BadRequestError.
        """
        too_large = BodyTooLargeError(f"the body is over {max_bytes} bytes (limits.max_body)")
        length = self.request.content_length
        if length is not None and length > max_bytes:
            raise too_large
        transport = self.request.transport
        expected = self.request.headers.get("Expect", "").lower()
        if expected == "100-continue" and transport is not None:
            transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        content = self.request.content
        try:
            if content.is_eof():  # it came in one piece with the head
                body = content.read_nowait()
                share.take(len(body))
            else:
                async with asyncio.timeout(timeout_s):
                    body = await _read_at_most(content, max_bytes, share)
        except TimeoutError:
            raise RequestTimeoutError(
                f"the body did not arrive within {timeout_s:g} s (limits.header_timeout)"
            ) from None
        except web.RequestPayloadError as error:
            self._last = True  # where the next request begins is not known any more
            raise BadRequestError(f"the body cannot be read: {error}") from None
        if len(body) > max_bytes:
            raise too_large
        return body

    async def send(
        self,
        status: int,
        body: bytes,
        *,
        headers: CIMultiDict[str] | None = None,
        content_type: str = JSON,
    ) -> None:
        """A whole answer."""
        headers = CIMultiDict() if headers is None else headers
        headers.setdefault("Content-Type", content_type)
        headers[REQUEST_ID] = self.request_id
        headers["Server"] = "headstart"
        self._response = response = web.Response(status=status, body=body, headers=headers)
        if self._last or status == RequestTimeoutError.status:
            response.force_close()
        self.writing = True
        await response.prepare(self.request)
        await response.write_eof()
        self.writing = False

    async def send_error(self, error: GatewayError) -> None:
        """An error in OpenAI's envelope; in a stream that has begun, as its last event."""
        if self._response is not None:
            if self._streaming:
                await self._break_off(self._response, error)
            else:
                self.abort()
            return
        headers: CIMultiDict[str] = CIMultiDict()
        if error.retry_after_s is not None:
            headers["Retry-After"] = str(error.retry_after_s)
        if isinstance(error, MethodNotAllowedError):
            headers["Allow"] = error.allow
        await self.send(error.status, encode_error(error), headers=headers)

    async def start(self, status: int, headers: CIMultiDict[str], *, at_once: bool = True) -> None:
        """The head of a stream. `at_once=False`: a piece follows directly, send both together."""
        headers[REQUEST_ID] = self.request_id
        headers["Server"] = "headstart"
        stream = web.StreamResponse if at_once else _HeldHead
        self._response = response = stream(status=status, headers=headers)
        if self._last:
            response.force_close()
        await response.prepare(self.request)
        self._streaming = True

    async def write(self, chunk: bytes) -> None:
        """A piece of the stream; returns when the client has room for more."""
        assert self._response is not None
        self.writing = True
        await self._response.write(chunk)
        self.writing = False

    async def end(self, chunk: bytes = b"") -> None:
        """The last piece and the end of the stream."""
        assert self._response is not None
        self._streaming = False
        self.writing = True
        await self._response.write_eof(chunk)
        self.writing = False

    def abort(self) -> None:
        """Drop the connection: nothing sensible can be said any more."""
        if self.request.transport is not None:
            self.request.transport.abort()

    def response(self) -> web.StreamResponse:
        """What aiohttp wants to have at the end."""
        assert self._response is not None
        return self._response

    async def _break_off(self, response: web.StreamResponse, error: GatewayError) -> None:
        try:
            async with asyncio.timeout(_LAST_WORD_S):
                await response.write(encode_event(error))
                await response.write_eof()
        except TimeoutError:
            self.abort()


async def _read_at_most(content: StreamReader, max_bytes: int, share: BodyShare) -> bytes:
    """All of it, or a little more than `max_bytes` of it."""
    parts: list[bytes] = []
    size = 0
    while size <= max_bytes and (chunk := await content.readany()):
        share.take(len(chunk))
        size += len(chunk)
        parts.append(chunk)
    return parts[0] if len(parts) == 1 else b"".join(parts)

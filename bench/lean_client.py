"""The client of bench.overhead: one kept connection, streamed chat answers, nothing else."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

FIRST_TOKEN_EVENT = 2
"""The first event of a chat stream says the role; the second one has the first token."""

_END = b"0\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Timing:
    """Of one answer, from the moment its request was written."""

    ttft_s: float
    whole_s: float


class LeanClient(asyncio.Protocol):
    """One connection to a server that answers with chunked streams."""

    def __init__(self, first_token_event: int = FIRST_TOKEN_EVENT) -> None:
        """`first_token_event`: which event of an answer has the first token; 1 for completions."""
        self._first_token_event = first_token_event
        self._transport: asyncio.Transport | None = None
        self._answer = bytearray()
        self._first_token: float | None = None
        self._ended: asyncio.Future[float] | None = None
        self.closed = False
        """The server has closed it; it may do so when nothing was asked for a while."""

    @classmethod
    async def connect(cls, url: str, first_token_event: int = FIRST_TOKEN_EVENT) -> LeanClient:
        parts = urlsplit(url)
        loop = asyncio.get_running_loop()
        host, port = parts.hostname or "127.0.0.1", parts.port or 80
        _, client = await loop.create_connection(lambda: cls(first_token_event), host, port)
        return client

    @property
    def answer(self) -> bytes:
        """All bytes of the last answer."""
        return bytes(self._answer)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    async def ask(self, request: bytes) -> Timing:
        """Send it and read the answer to its end. RuntimeError when that is not a stream."""
        assert self._transport is not None
        self._ended = asyncio.get_running_loop().create_future()
        self._answer.clear()
        self._first_token = None
        started = time.perf_counter()
        self._transport.write(request)
        ended = await self._ended
        if self._first_token is None or not self._answer.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"not a stream: {bytes(self._answer[:500])!r}")
        return Timing(self._first_token - started, ended - started)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        answer = self._answer
        answer += data
        if self._first_token is None and answer.count(b"data: ") >= self._first_token_event:
            self._first_token = now
        ended = answer.endswith(_END) or not answer.startswith(b"HTTP/1.1 200")
        if ended and self._ended is not None and not self._ended.done():
            self._ended.set_result(now)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(exc or ConnectionResetError("the server hung up"))


def chat_request(url: str, model: str, system: str | None, user: str) -> bytes:
    """A whole HTTP request for one streamed token."""
    messages = [{"role": "user", "content": user}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    fields = {
        "model": model, "messages": messages, "max_tokens": 1, "temperature": 0, "stream": True,
    }  # fmt: skip
    body = json.dumps(fields, separators=(",", ":")).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body

"""A measuring device: a server that answers like vLLM's chat endpoint, at once, with one token.

It computes nothing. What a request takes beyond asking it directly is the cost of what stands
between, free of an engine's own noise. Nothing but bench.overhead uses it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
from typing import Any, cast

import uvloop

MODEL = "smollm2-135m-instruct"

_STREAM = re.compile(rb'"stream"\s*:\s*true')
_LENGTH = re.compile(rb"\r\ncontent-length:\s*(\d+)", re.IGNORECASE)
_USAGE = {
    "prompt_tokens": 1,
    "total_tokens": 2,
    "completion_tokens": 1,
    "prompt_tokens_details": {"cached_tokens": 0, "created_cache_tokens": 0},
}
_METRICS = {"time_to_first_token_ms": 0.0, "generation_time_ms": 0.0, "queue_time_ms": 0.0}
_HEAD = {"id": "chatcmpl-0123456789abcdef", "created": 1, "model": MODEL}


class InstantEngine(asyncio.Protocol):
    """One connection. Bodies come with their length, as the gateway and the client send them."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._held = bytearray()
        self._needed = 0
        """Bytes of the request that is coming in; 0 while its head is incomplete."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._held += data
        if not self._needed:
            end = self._held.find(b"\r\n\r\n")
            if end < 0:
                return
            length = _LENGTH.search(self._held, 0, end)
            self._needed = end + 4 + (int(length[1]) if length else 0)
        if len(self._held) >= self._needed:
            assert self._transport is not None
            self._transport.write(_answer(self._held))
            self._held.clear()
            self._needed = 0


def _answer(request: bytearray) -> bytes:
    if request.startswith(b"GET"):
        return _PLAIN
    return _STREAMED if _STREAM.search(request) else _WHOLE


def _chunk(choices: list[dict[str, Any]], **more: Any) -> bytes:
    value = {**_HEAD, "object": "chat.completion.chunk", "choices": choices, **more}
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


def _streamed() -> bytes:
    """Role, token, usage and end, as the engine sends a single token: each event is a chunk, and
    all of them leave together."""
    events = (
        _chunk([{"index": 0, "delta": {"role": "assistant", "content": ""}}]),
        _chunk([{"index": 0, "delta": {"content": "Hi"}, "finish_reason": "length"}]),
        _chunk([], usage=_USAGE, metrics=_METRICS),
        b"data: [DONE]\n\n",
    )
    head = (
        b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
        b"transfer-encoding: chunked\r\n\r\n"
    )
    return head + b"".join(b"%x\r\n%b\r\n" % (len(e), e) for e in events) + b"0\r\n\r\n"


def _json(value: Any) -> bytes:
    body = json.dumps(value, separators=(",", ":")).encode()
    head = "HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


_PLAIN = _json({"object": "list", "data": [{"id": MODEL, "object": "model"}]})
_STREAMED = _streamed()
_WHOLE = _json(
    {
        **_HEAD,
        "object": "chat.completion",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hi"}}],
        "usage": _USAGE,
        "metrics": _METRICS,
    }
)


async def serve(port: int) -> None:
    """Until it is killed."""
    server = await asyncio.get_running_loop().create_server(InstantEngine, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m bench.instant_engine")
    parser.add_argument("--port", type=int, required=True)
    uvloop.run(serve(parser.parse_args().port))

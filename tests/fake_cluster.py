"""An API server of Kubernetes for tests, on loopback: lists and watches EndpointSlices."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

PATH = "/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"


def endpoint(address: str, *, ready: bool | None = True, pod: str | None = None) -> dict[str, Any]:
    """One endpoint of a slice."""
    return {
        "addresses": [address],
        "conditions": {} if ready is None else {"ready": ready, "serving": True},
        **({} if pod is None else {"targetRef": {"kind": "Pod", "name": pod, "uid": "u"}}),
    }


def endpoint_slice(
    name: str,
    endpoints: Sequence[dict[str, Any]],
    *,
    version: str = "1",
    address_type: str = "IPv4",
    ports: Sequence[dict[str, Any]] = ({"name": "http", "port": 8000, "protocol": "TCP"},),
) -> dict[str, Any]:
    """One slice, with keys that nobody here reads."""
    return {
        "kind": "EndpointSlice",
        "metadata": {"name": name, "resourceVersion": version, "labels": {"a": "b"}},
        "addressType": address_type,
        "endpoints": list(endpoints) or None,  # the server writes null for an empty list
        "ports": list(ports),
    }


class FakeCluster:
    """What is changed is told to everybody who watches."""

    def __init__(self) -> None:
        self.url = ""
        self.requests: list[web.Request] = []
        self.refusals: list[tuple[int, str]] = []
        """Answers to the next requests, each with a status and a message."""
        self.forbids_watching = False
        self.is_broken = False
        """Every request fails, and nobody is told anything."""
        self.forgets = False
        """Whoever watches, from whatever version, is told that it is too old: once."""
        self.slices: dict[str, dict[str, Any]] = {}
        self._version = 1
        self._watches: set[asyncio.Queue[bytes | None]] = set()
        self.gone = asyncio.Event()
        """Nobody watches."""

    @asynccontextmanager
    async def running(self, tls: ssl.SSLContext | None = None) -> AsyncIterator[FakeCluster]:
        """Serve on a port of its own."""
        app = web.Application()
        app.router.add_get(PATH, self._answer)
        runner = web.AppRunner(app, shutdown_timeout=1, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
        await site.start()
        host, port = runner.addresses[0][:2]
        self.url = f"{'http' if tls is None else 'https'}://{host}:{port}"
        try:
            yield self
        finally:
            await runner.cleanup()

    @property
    def num_watches(self) -> int:
        return len(self._watches)

    def put(self, name: str, endpoints: Sequence[dict[str, Any]], **keys: Any) -> None:
        """A slice is this from now on."""
        kind = "MODIFIED" if name in self.slices else "ADDED"
        self._version += 1
        made = endpoint_slice(name, endpoints, version=str(self._version), **keys)
        self.slices[name] = made
        self.tell(kind, made)

    def delete(self, name: str) -> None:
        """A slice is gone."""
        self._version += 1
        self.tell("DELETED", self.slices.pop(name))

    def tell(self, kind: str, what: dict[str, Any]) -> None:
        """One line to everybody who watches."""
        self.write(json.dumps({"type": kind, "object": what}).encode() + b"\n")

    def write(self, line: bytes | None) -> None:
        """Bytes to everybody who watches; None ends all watches."""
        for watch in self._watches:
            watch.put_nowait(line)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(request)
        if self.is_broken:
            return _status(500, "etcd is away")
        if self.refusals:
            return _status(*self.refusals.pop(0))
        if "watch" in request.query and self.forbids_watching:
            return _status(403, "watching is forbidden")
        if "watch" in request.query:
            return await self._watch(request)
        metadata = {"resourceVersion": str(self._version)}
        return web.json_response({"metadata": metadata, "items": list(self.slices.values())})

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        since = int(request.query["resourceVersion"])
        if self.forgets:
            self.forgets = False
            status = {"code": 410, "message": "too old resource version"}
            queue.put_nowait(json.dumps({"type": "ERROR", "object": status}).encode() + b"\n")
        for made in self.slices.values():
            if int(made["metadata"]["resourceVersion"]) > since:
                event = {"type": "MODIFIED", "object": made}
                queue.put_nowait(json.dumps(event).encode() + b"\n")
        mark = {"metadata": {"resourceVersion": str(self._version)}}
        queue.put_nowait(json.dumps({"type": "BOOKMARK", "object": mark}).encode() + b"\n")
        self.gone.clear()
        self._watches.add(queue)
        try:
            while (line := await queue.get()) is not None:
                await response.write(line)
        finally:
            self._watches.discard(queue)
            if not self._watches:
                self.gone.set()
        return response


def _status(code: int, message: str) -> web.Response:
    body = {"kind": "Status", "code": code, "message": message}
    return web.json_response(body, status=code)

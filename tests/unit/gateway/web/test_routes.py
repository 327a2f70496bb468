"""Which route answers a path, and what stands in its braces."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from yarl import URL

from gateway.web.app import App
from gateway.web.exchange import Exchange
from gateway.web.listener import Listener
from gateway.web.routes import Route


async def tell(exchange: Exchange) -> None:
    """Answers with what stood in the braces."""
    text = ";".join(f"{name}={value}" for name, value in exchange.path_parameters.items())
    await exchange.send(200, f"{exchange.request.method} {text}".encode())


ROUTES = {
    "/things": (Route("GET", tell, while_draining=True), Route("POST", tell)),
    "/things/{id}": (Route("DELETE", tell), Route("GET", tell)),
    "/things/{id}/paint": Route("POST", tell),
    "/things/{id}/parts/{part}": Route("GET", tell),
}


@asynccontextmanager
async def client_of(app: App) -> AsyncIterator[aiohttp.ClientSession]:
    """A client of the application, which listens meanwhile."""
    listener = Listener(app, header_timeout_s=10.0, idle_timeout_s=10.0, max_connections=10)
    port = await listener.start("127.0.0.1", 0)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client:
        yield client
    await listener.stop(1.0)


async def ask(client: aiohttp.ClientSession, method: str, path: str) -> tuple[int, str]:
    """Status, and the text or the error's message; the path goes out as it stands."""
    async with client.request(method, URL(path, encoded=True)) as response:
        if response.status == 200:
            return 200, await response.text()
        return response.status, (await response.json())["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "text"),
    [
        ("GET", "/things", "GET "),
        ("POST", "/things", "POST "),
        ("DELETE", "/things/7", "DELETE id=7"),
        ("GET", "/things/7", "GET id=7"),
        ("GET", "/things/7?force=1", "GET id=7"),
        ("POST", "/things/7/paint", "POST id=7"),
        ("GET", "/things/7/parts/x", "GET id=7;part=x"),
        ("GET", "/things/%5B::1%5D:80", "GET id=[::1]:80"),
        ("GET", "/things/[::1]:80", "GET id=[::1]:80"),
        ("GET", "/things/a%2Fpaint", "GET id=a/paint"),
        ("GET", "/things/a%252F", "GET id=a%2F"),
        ("GET", "/things/a+b%20c", "GET id=a+b c"),
        ("GET", "/things/caf%C3%A9", "GET id=caf\u00e9"),
        ("GET", "/things/%7Bid%7D", "GET id={id}"),
    ],
)
async def test_names_in_braces_stand_for_one_segment(method, path, text):
    """Decoded once, and split before that: an encoded slash is part of its segment."""
    async with client_of(App(ROUTES)) as client:
        assert await ask(client, method, path) == (200, text)


@pytest.mark.parametrize(
    ("method", "path", "status", "word"),
    [
        ("GET", "/things/", 404, "/things/"),
        ("POST", "/things//paint", 404, "/things//paint"),
        ("POST", "/things/7/paint/", 404, "/paint/"),
        ("POST", "/things/7/painted", 404, "/painted"),
        ("GET", "/things/7/parts", 404, "/parts"),
        ("GET", "/things/" + "x" * 3000, 404, "Invalid URL"),
        ("GET", "/things/%ff", 400, "not percent-encoded UTF-8"),
        ("PUT", "/things", 405, "answers GET, POST, not PUT"),
        ("POST", "/things/7", 405, "answers DELETE, GET, not POST"),
        ("GET", "/things/7/paint", 405, "answers POST, not GET"),
    ],
)
async def test_other_paths_and_methods_are_refused(method, path, status, word):
    """404 for a path that nothing answers, 405 for a method."""
    async with client_of(App(ROUTES)) as client:
        got, message = await ask(client, method, path)
        assert got == status
        assert word in message


async def test_head_is_answered_like_get():
    """Also where other methods have routes of their own."""
    async with client_of(App(ROUTES)) as client:
        for path in ("/things", "/things/7"):
            async with client.head(path) as response:
                assert response.status == 200


async def test_405_lists_all_methods():
    """In the header that says so."""
    async with client_of(App(ROUTES)) as client, client.put("/things") as response:
        assert response.headers["Allow"] == "GET, POST"


async def test_draining_is_a_matter_of_the_method():
    """A gateway that stops may still list, and adds nothing."""
    app = App(ROUTES)
    async with client_of(app) as client:
        app.draining = True
        assert (await ask(client, "GET", "/things"))[0] == 200
        assert (await ask(client, "POST", "/things"))[0] == 503

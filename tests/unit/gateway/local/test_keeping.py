"""Children that end are started again, whatever goes wrong at that."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from engine_adapter.base import LaunchError
from gateway.cli.serve import Parts
from gateway.cli.serve import _run as run_serve
from gateway.local.children import Children, ChildSpec
from gateway.local.keeping import keep_running
from gateway.local.stack import Stack
from gateway.settings.user_error import UserError
from policies.config import HeadstartConfig
from prefix_store.base import StoreError


def spec(tmp_path: Path, code: str) -> ChildSpec:
    return ChildSpec("script", (sys.executable, "-c", code), tmp_path / "script.log")


async def test_errors_at_a_restart_are_said_and_tried_again(tmp_path):
    """None of them ends the keeping; the child that starts in the end is kept as well."""
    failures = [
        OSError("too many processes"),
        LaunchError("no weights"),
        StoreError("no directory"),
        UserError("no space"),
    ]
    said: list[str] = []
    alive = asyncio.Event()

    async with Children() as children:

        async def start():
            if failures:
                raise failures.pop(0)
            alive.set()
            return await children.start(spec(tmp_path, "import time; time.sleep(600)"))

        first = await children.start(spec(tmp_path, "raise SystemExit(3)"))
        keeping = asyncio.create_task(
            keep_running(children, first, start, said.append, first_backoff_s=0.001)
        )
        async with asyncio.timeout(30):
            await alive.wait()
        assert not keeping.done()
        keeping.cancel()
        await asyncio.wait([keeping])
    assert len(said) == 5
    assert "exit code 3" in said[0]
    for line, why in zip(said[1:], ["processes", "weights", "directory", "space"], strict=True):
        assert why in line
        assert line.startswith("script could not be started")


async def test_the_embedded_store_is_kept_running(tmp_path, monkeypatch):
    """It dies while the gateway serves; each time another one takes its place."""
    started: list = []
    said: list[str] = []
    enough = asyncio.Event()

    async def spawn(self, children):
        lasts = 600 if len(started) == 2 else 0
        child = await children.start(spec(tmp_path, f"import time; time.sleep({lasts})"))
        started.append(child)
        if len(started) > 2:
            enough.set()
        return child

    async def serve_until_enough(config):
        async with asyncio.timeout(30):
            await enough.wait()

    async def keep(children, child, start, notice):
        await keep_running(children, child, start, said.append, first_backoff_s=0.001)

    monkeypatch.setattr(Stack, "_spawn_store", spawn)
    monkeypatch.setattr(Stack, "start_store", spawn)
    monkeypatch.setattr("gateway.local.stack.keep_running", keep)
    monkeypatch.setattr("gateway.cli.serve.serve", serve_until_enough)
    monkeypatch.setattr("gateway.cli.serve._cancel_on_signals", lambda: None)
    config = HeadstartConfig(runtime_dir=str(tmp_path / "rt"))
    await run_serve(config, Parts(store=True, engines=False))
    assert len(started) == 3
    assert len(said) == 2

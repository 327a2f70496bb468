"""`headstart store`: runs the store server of this host."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
from pathlib import Path

import uvloop

from gateway.cli.common import load_config_of, set_up_logging
from gateway.settings.config_watch import ConfigWatch
from gateway.settings.user_error import UserError
from prefix_store.runtime_dir import RuntimePaths
from prefix_store.server import StoreServer


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C. SIGHUP, and a change of the file, apply new policies."""
    loaded = load_config_of(args)
    config = loaded.config
    if config.store is None:
        raise UserError("store is null in the configuration: remove that line to run a store")
    set_up_logging(args.log_level)
    uvloop.run(_until_signal(StoreServer(config, RuntimePaths.of(config)), loaded.path))
    return 0


async def _until_signal(server: StoreServer, path: Path | None) -> None:
    serving = asyncio.ensure_future(_serve(server, path))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, serving.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await serving


async def _serve(server: StoreServer, path: Path | None) -> None:
    watch = ConfigWatch(path, server.reload, server.refuse_reload)
    ready = asyncio.Event()
    watching = asyncio.ensure_future(watch.run(ready))
    try:
        await server.run(ready.set)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)

"""`headstart store`: runs the store server of this host."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal

import uvloop

from gateway.cli_common import config_of, set_up_logging
from gateway.user_error import UserError
from prefix_store.runtime_dir import RuntimePaths
from prefix_store.server import StoreServer


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C."""
    config = config_of(args)
    if config.store is None:
        raise UserError("store is null in the configuration: remove that line to run a store")
    set_up_logging(args.log_level)
    uvloop.run(_until_signal(StoreServer(config, RuntimePaths.of(config))))
    return 0


async def _until_signal(server: StoreServer) -> None:
    serving = asyncio.ensure_future(server.run())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, serving.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await serving

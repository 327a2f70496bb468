"""`headstart serve`: the gateway, with the store and the engine as children where wanted."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import uvloop
from pydantic import ValidationError

from engine_adapter.launcher import port_is_free
from engine_adapter.vllm_build import installed_build
from gateway.cli.common import load_config_of, set_up_logging, with_model
from gateway.local.background import run_in_background
from gateway.local.children import Child, Children
from gateway.local.stack import Stack
from gateway.serve import serve
from gateway.settings.config_watch import ConfigWatch
from gateway.settings.user_dirs import state_dir
from gateway.settings.user_error import UserError
from policies.config import HeadstartConfig
from policies.engine import EngineConfig
from policies.fleet import StaticDiscovery
from prefix_store.runtime_dir import RuntimePaths

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Parts:
    """What runs beside the gateway."""

    store: bool
    engines: bool


def parts_of(config: HeadstartConfig, *, with_store: bool, with_engine: bool) -> Parts:
    """Without engines in the configuration everything is ours; else only what is asked for."""
    discovered = not isinstance(config.fleet.discovery, StaticDiscovery)
    embedded = "engines" not in config.model_fields_set and not discovered
    if with_engine and discovered:
        raise UserError(
            "--with-engine: the replicas are discovered, none is listed; start each of them with "
            "`headstart engine` or remove fleet.discovery"
        )
    if with_store and config.store is None:
        raise UserError("--with-store: store is null in the configuration; remove that line")
    return Parts(
        store=config.store is not None and (with_store or embedded),
        engines=with_engine or embedded,
    )


def listening_at(config: HeadstartConfig, listen: str | None) -> HeadstartConfig:
    """The configuration with another address to listen on, which must be free."""
    if listen is not None:
        try:
            HeadstartConfig(listen=listen)
        except ValidationError as error:
            raise UserError(f"--listen: {error.errors()[0]['ctx']['error']}") from None
        config = config.model_copy(update={"listen": listen})
    if config.port and not port_is_free(config.host, config.port):
        raise UserError(
            f"port {config.port} on {config.host} is in use: stop what listens there or choose "
            "another address with `listen` or --listen"
        )
    return config


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C."""
    loaded = load_config_of(args)
    config = loaded.config
    parts = parts_of(config, with_store=args.with_store, with_engine=args.with_engine)
    config = listening_at(config, args.listen)
    set_up_logging(args.log_level)
    config = with_model(config)
    runtime_dir = str(RuntimePaths.of(config).root)
    config = config.model_copy(update={"runtime_dir": runtime_dir})
    with contextlib.suppress(asyncio.CancelledError):
        uvloop.run(_run(config, parts, loaded.path))
    return 0


async def _run(config: HeadstartConfig, parts: Parts, path: Path | None = None) -> None:
    if not (parts.store or parts.engines):
        async with AsyncExitStack() as kept:
            watch = ConfigWatch(path, _check_only, _log_refusal)
            await run_in_background(kept, {"watching the configuration": watch.run})
            await serve(config)
        return
    _cancel_on_signals()
    stack = Stack(config, installed_build(), state_dir() / "logs", logger.warning)
    if parts.engines:
        for engine in config.engines:
            await asyncio.to_thread(stack.check_engine, engine)
    try:
        async with Children() as children, AsyncExitStack() as kept:
            watch = ConfigWatch(path, _check_only, _log_refusal)
            if parts.store:
                watch = ConfigWatch(path, stack.hand_to_store, stack.refuse_reload)
                logger.info("starting the store (log: %s/store.log)", stack.log_dir)
                store = await stack.start_store(children)
                await run_in_background(
                    kept, {"keeping the store": partial(stack.keep_store, children, store)}
                )
            await run_in_background(kept, {"watching the configuration": watch.run})
            started = await _start_engines(stack, children) if parts.engines else []
            await run_in_background(
                kept,
                {
                    f"keeping {each.engine.id}": partial(
                        stack.keep_engine, children, each.child, each.engine
                    )
                    for each in started
                },
            )
            await serve(config)
    finally:
        stack.remove_files()


async def _check_only(config: HeadstartConfig) -> None:
    """The gateway itself has no policies yet that change while it runs."""
    del config
    logger.info("the configuration is valid; the gateway's own keys take effect at its next start")


async def _log_refusal(reason: str) -> None:
    logger.error("the configuration cannot be used: %s", reason)


@dataclass(frozen=True, slots=True)
class _Started:
    child: Child
    engine: EngineConfig


async def _start_engines(stack: Stack, children: Children) -> list[_Started]:
    """All engines of the configuration, side by side, once they answer."""
    started = []
    for engine in stack.config.engines:
        logger.info("starting %s (log: %s/%s.log)", engine.id, stack.log_dir, engine.id)
        started.append(_Started(await stack.start_engine(children, engine), engine))
    for each in started:
        await stack.engine_ready(each.child, each.engine)
        logger.info("%s is ready at %s", each.engine.id, each.engine.url)
    return started


def _cancel_on_signals() -> None:
    """While children start. The gateway puts its own handlers in place when it serves."""
    task = asyncio.current_task()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        if task is not None:
            loop.add_signal_handler(number, task.cancel)

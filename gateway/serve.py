"""The composition root of `headstart serve`: makes everything, runs it, closes it in reverse."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

from engine_adapter.base import Prompt, RenderingError
from engine_adapter.engine_client import EngineClient
from engine_adapter.load_reports import LoadReports
from engine_adapter.rendering import PromptRenderer
from gateway.accounts.accounting import Accounting
from gateway.fleet.choice import Replica
from gateway.fleet.followed_events import FollowedEvents
from gateway.fleet.places import Places
from gateway.local.background import run_in_background
from gateway.model.fetch import ensure_demo_model
from gateway.request.body import Api
from gateway.request.ended_calls import EndedCalls
from gateway.request.health import Health
from gateway.request.outcomes import Outcomes
from gateway.request.proxy import Proxy, ServedModel
from gateway.request.rendering_checks import RenderingChecks
from gateway.request.request_log import RequestLog
from gateway.request.tenants import Tenants
from gateway.settings.user_error import UserError
from gateway.stats.loop_lag import LoopLag
from gateway.stats.stats_page import StatsPage
from gateway.stats.store_probe import StoreProbe
from gateway.web.app import App, Route
from gateway.web.body_memory import BodyMemory
from gateway.web.listener import Listener
from policies.config import HeadstartConfig
from policies.engine import EngineConfig
from prefix_store.base import BlockHash
from prefix_store.residency import Holder, Medium, Residency
from prefix_store.runtime_dir import RuntimePaths

log = logging.getLogger(__name__)

_PROBE_TIMEOUT_S = 2.0


async def serve(config: HeadstartConfig, *, ready: Callable[[], None] | None = None) -> None:
    """Serve until SIGTERM or SIGINT, then drain; a second signal ends the draining.

    `ready` is called when connections are accepted. Raises UserError for what has to be mended.
    """
    async with AsyncExitStack() as owned:
        gateway = await Gateway.open(config, owned)
        await gateway.run(ready or (lambda: None))


class Gateway:
    """All parts of one gateway process; they are closed by the stack that they were opened on."""

    def __init__(self, config: HeadstartConfig, app: App, health: Health) -> None:
        self._config = config
        self._app = app
        self._health = health

    @classmethod
    async def open(cls, config: HeadstartConfig, owned: AsyncExitStack) -> Gateway:
        """Make and wire everything but the listening socket."""
        limits, paths = config.limits, RuntimePaths.of(config)
        paths.create()
        model = ServedModel(config.model.name, config.model.max_model_len, block_size_of(config))
        tenants = Tenants.load(config)
        renderer = await _load_renderer(config, model)
        if renderer is not None:
            owned.callback(renderer.close)
        residency, loads, loop_lag = Residency(limits.index_memory), LoadReports(), LoopLag()
        events = FollowedEvents(
            config, paths, block_size=model.block_size, residency=residency, loads=loads
        )
        replicas = [_replica(config, engine, owned) for engine in config.engines]
        places = Places(
            limits.max_concurrent_requests, limits.max_waiting_requests, limits.max_wait
        )
        accounting = Accounting(
            [replica.id for replica in replicas],
            model=model.name,
            version=metadata.version("headstart"),
            block_size=model.block_size,
        )
        outcomes, request_log = _outcomes(config, paths, owned), _request_log(config, owned)
        page = StatsPage(
            accounting=accounting,
            replicas=replicas,
            places=places,
            residency=residency,
            renderer=renderer,
            memo_capacity_bytes=limits.memo_memory,
            engine_events=events.engines,
            store_events=events.store,
            store=_store_probe(config, paths, owned),
            loop_lag=loop_lag,
            outcomes=outcomes,
            request_log=request_log,
        )
        checks = RenderingChecks(residency, events.engines, accounting.rendering_checked)
        owned.callback(checks.close)
        ended = EndedCalls(loads, page, checks, outcomes=outcomes, log=request_log)
        owned.callback(ended.close)
        proxy = Proxy(
            model=model,
            limits=limits,
            tenants=tenants,
            places=places,
            body_memory=BodyMemory(limits.body_memory),
            renderer=renderer or NoRenderer(),
            residency=residency,
            replicas=replicas,
            ended=ended,
        )
        health = Health(replicas, tenants, _PROBE_TIMEOUT_S)
        await run_in_background(owned, {"loop lag": loop_lag.run, **events.runs()})
        return cls(config, App(_routes(proxy, health, page)), health)

    async def run(self, ready: Callable[[], None]) -> None:
        """Listen, serve, drain."""
        config, limits = self._config, self._config.limits
        listener = Listener(
            self._app,
            header_timeout_s=limits.header_timeout,
            idle_timeout_s=limits.idle_timeout,
            max_connections=limits.max_connections,
        )
        try:
            port = await listener.start(config.host, config.port)
        except OSError as error:
            raise UserError(f"listen: {config.listen}: {error.strerror or error}") from error
        # What is loaded by now stays: the garbage collector need not walk through it ever again.
        gc.collect()
        gc.freeze()
        with _signals() as (stop, hurry):
            log.info("listening at http://%s:%d", config.host, port)
            ready()
            try:
                await stop.wait()
                self._app.draining = self._health.draining = True
                if listener.running:
                    log.info("stopping; %d answers may end first", listener.running)
                await _unless(hurry, listener.stop(limits.drain_timeout))
            finally:
                await listener.stop(0.0)


class NoRenderer:
    """For models whose prompts cannot be rendered exactly: all is forwarded, nothing predicted."""

    async def chat(self, body: Mapping[str, Any], root: BlockHash) -> Prompt:
        """Raises RenderingError."""
        self._refuse()

    async def completion(self, body: Mapping[str, Any], root: BlockHash) -> Prompt:
        """Raises RenderingError."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise RenderingError("this model's prompts cannot be rendered here")


def block_size_of(config: HeadstartConfig) -> int:
    """The block size of all engines, in tokens. UserError when they differ."""
    sizes = {engine.block_size for engine in config.engines}
    if len(sizes) > 1:
        raise UserError(
            f"engines: block_size must be the same for all, not {sorted(sizes)}: "
            "blocks of different sizes cannot be matched with one another"
        )
    return sizes.pop()


def _replica(config: HeadstartConfig, engine: EngineConfig, owned: AsyncExitStack) -> Replica:
    limits = config.limits
    client = EngineClient(
        engine.url,
        max_requests=limits.max_concurrent_requests,
        connect_timeout_s=limits.connect_timeout,
    )
    owned.push_async_callback(client.close)
    return Replica(engine.id, client, holders_of(config, engine))


def holders_of(config: HeadstartConfig, engine: EngineConfig) -> tuple[Holder, ...]:
    """The engine's own memory and the tiers of the store on its host."""
    device, store = Holder(engine.id, Medium.DEVICE), config.store
    if store is None:
        return (device,)
    media = [Medium.MEMORY]
    media += [Medium.DISK] if store.disk is not None else []
    media += [Medium.REDIS] if store.redis is not None else []
    return (device, *(Holder(store.id, medium) for medium in media))


def _store_probe(
    config: HeadstartConfig, paths: RuntimePaths, owned: AsyncExitStack
) -> StoreProbe | None:
    if config.store is None:
        return None
    probe = StoreProbe(paths.store_socket(config))
    owned.callback(probe.close)
    return probe


def _outcomes(
    config: HeadstartConfig, paths: RuntimePaths, owned: AsyncExitStack
) -> Outcomes | None:
    if config.store is None:
        return None
    outcomes = Outcomes(paths.store_socket(config))
    owned.callback(outcomes.close)
    return outcomes


def _request_log(config: HeadstartConfig, owned: AsyncExitStack) -> RequestLog | None:
    if config.request_log is None:
        return None
    request_log = RequestLog.open(config.request_log)
    owned.callback(request_log.close)
    return request_log


async def _load_renderer(config: HeadstartConfig, model: ServedModel) -> PromptRenderer | None:
    """None, with a warning, when this model's prompts cannot be rendered exactly."""

    def load() -> PromptRenderer:
        path = config.model.path
        return PromptRenderer.load(
            ensure_demo_model() if path is None else Path(path).expanduser(),
            block_size=model.block_size,
            memo_bytes=config.limits.memo_memory,
        )

    try:
        return await asyncio.to_thread(load)
    except RenderingError as error:
        log.warning("prompts are forwarded without prediction: %s", error)
        return None


def _routes(proxy: Proxy, health: Health, page: StatsPage) -> dict[str, Route]:
    return {
        Api.CHAT.value: Route("POST", proxy.chat),
        Api.COMPLETIONS.value: Route("POST", proxy.completions),
        "/v1/models": Route("GET", health.models),
        "/healthz": Route("GET", health.healthz, while_draining=True),
        "/readyz": Route("GET", health.readyz, while_draining=True),
        "/metrics": Route("GET", page.metrics, while_draining=True),
        "/cache/stats": Route("GET", page.cache_stats, while_draining=True),
    }


@contextlib.contextmanager
def _signals() -> Iterator[tuple[asyncio.Event, asyncio.Event]]:
    """Set by the first SIGTERM or SIGINT, and by the second."""
    loop = asyncio.get_running_loop()
    stop, hurry = asyncio.Event(), asyncio.Event()

    def signalled() -> None:
        (hurry if stop.is_set() else stop).set()

    numbers = (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, signalled)
    try:
        yield stop, hurry
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


async def _unless(hurry: asyncio.Event, work: Awaitable[None]) -> None:
    """`work`, cancelled when `hurry` comes first."""
    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(hurry.wait())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

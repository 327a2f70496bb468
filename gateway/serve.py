"""The composition root of `headstart serve`: makes everything, runs it, closes it in reverse."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from functools import partial
from importlib import metadata

from engine_adapter.load_reports import LoadReports
from gateway.accounts.accounting import Accounting
from gateway.fleet.admin import Admin
from gateway.fleet.admin_access import AdminAccess
from gateway.fleet.decisions import Decisions
from gateway.fleet.discovery import discovery_of
from gateway.fleet.dispatch import Dispatcher
from gateway.fleet.fleet import Fleet
from gateway.fleet.followed_events import FollowedEvents
from gateway.fleet.places import Places
from gateway.fleet.report_sampling import ReportSampler
from gateway.fleet.served_models import ServedModels
from gateway.local.background import Run, run_in_background
from gateway.model.fetch import ensure_demo_model
from gateway.request.body import Api
from gateway.request.ended_calls import EndedCalls
from gateway.request.health import Health
from gateway.request.outcomes import Outcomes
from gateway.request.proxy import Proxy
from gateway.request.renderers import Renderers
from gateway.request.rendering_checks import RenderingChecks
from gateway.request.request_log import RequestLog
from gateway.request.tenants import Tenants
from gateway.settings.user_error import UserError
from gateway.stats.loop_lag import LoopLag
from gateway.stats.stats_page import StatsPage
from gateway.stats.store_probe import StoreProbe
from gateway.web.app import App
from gateway.web.body_memory import BodyMemory
from gateway.web.listener import Listener
from gateway.web.routes import Route
from policies.config import HeadstartConfig
from policies.engine import EngineConfig
from policies.fleet import StaticDiscovery
from prefix_store.residency import Residency
from prefix_store.runtime_dir import RuntimePaths

log = logging.getLogger(__name__)

_PROBE_TIMEOUT_S = 2.0
_GC_THRESHOLDS = (20_000, 20, 20)


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
        tenants = Tenants.load(config)
        models = await asyncio.to_thread(ServedModels.of, config)
        renderers = Renderers(config, ensure_demo_model)
        owned.callback(renderers.close)
        block_size = block_size_of(config)
        residency, loads, loop_lag = Residency(limits.index_memory), LoadReports(), LoopLag()
        events = FollowedEvents(
            config,
            paths,
            block_size=block_size,
            residency=residency,
            loads=loads,
            root_of=models.root_of,
            root_of_store=models.root_of_store,
        )
        places = Places(
            limits.max_concurrent_requests, limits.max_waiting_requests, limits.max_wait
        )
        accounting = Accounting(
            (),
            model=config.model.name,
            version=metadata.version("headstart"),
            block_size=block_size,
        )
        decisions = Decisions()
        outcomes, request_log = _outcomes(config, paths, owned), _request_log(config, owned)
        page = StatsPage(
            accounting=accounting,
            places=places,
            residency=residency,
            renderers=renderers.by_model,
            memo_capacity_bytes=limits.memo_memory,
            events=events,
            routing=config.routing.kind,
            decisions=decisions,
            store=_store_probe(config, paths, owned),
            loop_lag=loop_lag,
            outcomes=outcomes,
            request_log=request_log,
        )
        await owned.enter_async_context(events)
        fleet = Fleet(config, _Names(config.model.name, models, renderers), events, page)
        owned.push_async_callback(fleet.close)
        page.show(fleet)
        discovery = discovery_of(config)
        if discovery is None:
            for engine in config.engines:
                await fleet.add(engine)
        sampler = ReportSampler(events.learned)
        checks = RenderingChecks(residency, events.engines, accounting.rendering_checked)
        owned.callback(checks.close)
        ended = EndedCalls(loads, page, checks, outcomes=outcomes, log=request_log, sampler=sampler)
        owned.callback(ended.close)
        proxy = Proxy(
            models=models,
            renderers=renderers.by_model,
            limits=limits,
            max_attempts=config.fleet.max_attempts,
            tenants=tenants,
            places=places,
            body_memory=BodyMemory(limits.body_memory),
            dispatcher=Dispatcher(
                fleet,
                config.routing.router(),
                residency,
                events,
                coalescing=config.fleet.coalescing,
                decisions=decisions,
            ),
            ended=ended,
            sampler=sampler,
        )
        health = Health(fleet, tenants, _PROBE_TIMEOUT_S)
        runs: dict[str, Run] = {"loop lag": loop_lag.run}
        if discovery is not None:
            runs["discovery"] = partial(fleet.follow, discovery)
        await run_in_background(owned, runs)
        admin = Admin(fleet, AdminAccess.load(config.admin))
        routes = {**_routes(proxy, health, page), **admin.routes()}
        return cls(config, App(routes), health)

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
        # A request makes hundreds of objects and hardly a cycle: looking for cycles after every 700
        # objects, as is the default, would take a tenth of the time.
        gc.set_threshold(*_GC_THRESHOLDS)
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


def block_size_of(config: HeadstartConfig) -> int:
    """Tokens per block of the first model, whose blocks the stores hold."""
    discovery = config.fleet.discovery
    if isinstance(discovery, StaticDiscovery):
        return config.engines[0].block_size
    return discovery.engine.block_size


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


class _Names:
    """What names mean, and a renderer for each model that is served."""

    def __init__(self, first: str, models: ServedModels, renderers: Renderers) -> None:
        self._first = first
        self._models = models
        self._renderers = renderers
        self.serves = models.serves
        self.remove_replica = models.remove_replica

    async def add_replica(self, engine: EngineConfig) -> None:
        await self._models.add_replica(engine)
        await self._renderers.load(engine.model or self._first, engine.block_size)


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

"""`headstart doctor`: checks every handshake and says what to change."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator

from engine_adapter.base import RenderingError
from engine_adapter.rendering import PromptRenderer
from gateway.cli.common import check_demo_model, load_config_of, model_dir_of, say
from gateway.doctor.engine import DOCTOR_SALT, EngineDoctor, probe_body
from gateway.doctor.finding import Finding, Level, fail, ok
from gateway.doctor.host import check_gateway, check_runtime_dir, check_store, check_tenants
from gateway.doctor.replicas import find_replicas
from gateway.doctor.tokens import check_events, check_rendering
from policies.config import HeadstartConfig
from policies.engine import EngineConfig
from prefix_store.hashing import routing_root
from prefix_store.runtime_dir import RuntimePaths

MEMO_BYTES = 16 * 1024**2


def run(args: argparse.Namespace) -> int:
    """Print one line a check; 1 when one of them failed."""
    loaded = load_config_of(args)
    for model in loaded.config.models:
        check_demo_model(model)
    say(ok("configuration", str(loaded.path or "built-in defaults")).line())
    return asyncio.run(_report(loaded.config))


async def _report(config: HeadstartConfig) -> int:
    failed = 0
    async for finding in examine(config):
        say(finding.line())
        failed += finding.level is Level.FAIL
    say()
    say("all is well" if not failed else f"{failed} to mend")
    return 1 if failed else 0


async def examine(config: HeadstartConfig) -> AsyncIterator[Finding]:
    """All findings, as they come."""
    paths = RuntimePaths.of(config)
    yield check_runtime_dir(paths.root)
    yield check_tenants(config)
    found = await find_replicas(config)
    if found.finding is not None:
        yield found.finding
    for engine in found.engines:
        async for finding in _examine_engine(config, engine, paths):
            yield finding
    # Of those that are discovered the store knows other ids: those that they were started with.
    known = () if found.finding is not None else found.engines
    for finding in await asyncio.to_thread(lambda: list(check_store(config, paths, known))):
        yield finding
    yield await asyncio.to_thread(check_gateway, config, found.engines)


async def _examine_engine(
    config: HeadstartConfig, engine: EngineConfig, paths: RuntimePaths
) -> AsyncIterator[Finding]:
    doctor = EngineDoctor(config, engine, paths)
    reachable = await asyncio.to_thread(doctor.is_reachable)
    yield reachable
    if reachable.level is Level.FAIL:
        return
    served = await asyncio.to_thread(doctor.serves_model)
    yield served
    if served.level is Level.FAIL:
        return  # every further request would only say the same
    if engine.report_events:
        yield await asyncio.to_thread(doctor.announces_events)
    model_dir = await asyncio.to_thread(model_dir_of, config, engine)
    try:
        renderer = await asyncio.to_thread(
            lambda: PromptRenderer.load(
                model_dir, block_size=engine.block_size, memo_bytes=MEMO_BYTES
            )
        )
    except (RenderingError, OSError) as error:
        yield fail(f"{engine.id} token equality", f"no tokenizer in {model_dir}: {error}")
        return
    try:
        for finding in await check_rendering(engine, doctor.model.name, renderer):
            yield finding
        async for finding in _probe(doctor, renderer):
            yield finding
    finally:
        renderer.close()
    if config.store is not None:
        yield await asyncio.to_thread(doctor.has_connector)


async def _probe(doctor: EngineDoctor, renderer: PromptRenderer) -> AsyncIterator[Finding]:
    """One request, watched from both sides: its answer and the events that it makes."""
    model, engine = doctor.model.name, doctor.engine
    body = probe_body(model, engine.block_size)
    prompt = await renderer.completion(body, routing_root(model, DOCTOR_SALT))
    tokens = [int(token) for token in prompt.token_ids]
    send = asyncio.ensure_future(asyncio.to_thread(lambda: list(doctor.reports_usage(body))))
    if not engine.report_events:
        for finding in await send:
            yield finding
        yield ok(f"{engine.id} events", "none, as configured: what it holds is guessed")
        return
    events = await check_events(engine, doctor.paths, tokens, send)
    for finding in (*await send, *events):
        yield finding

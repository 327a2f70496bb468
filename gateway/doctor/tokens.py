"""The doctor's checks of tokens: our rendering against the engine's, and events against both."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engine_adapter.base import RenderingError
from engine_adapter.event_subscriber import EventSubscriber, binds
from engine_adapter.rendering import PromptRenderer
from gateway.doctor.engine import DOCTOR_SALT
from gateway.doctor.finding import Finding, fail, ok, warn
from gateway.local.local_http import HttpError, request
from policies.engine import EngineConfig
from prefix_store.events import BlockStored, EventBatch
from prefix_store.hashing import routing_root
from prefix_store.runtime_dir import RuntimePaths

EVENTS_WITHIN_S = 10.0

SAMPLES: dict[str, list[dict[str, Any]]] = {
    "one user message": [{"role": "user", "content": "What is the capital of France?"}],
    "system and turns": [
        {"role": "system", "content": "You answer briefly.\n\n- rule one\n- rule two"},
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": "Hello, how can I help?"},
        {"role": "user", "content": "Count: 1, 2, 3 ..."},
    ],
    "unicode": [{"role": "user", "content": "Grüße, 世界 👩‍🚀 e\u0301\u00a0\u200b<|x|>"}],
    "content parts": [{"role": "user", "content": [{"type": "text", "text": "in a part"}]}],
    "empty content": [{"role": "user", "content": ""}],
}


async def check_rendering(
    engine: EngineConfig, model: str, renderer: PromptRenderer
) -> list[Finding]:
    """Each sample conversation gives the same token ids here and in the engine."""
    name = f"{engine.id} token equality"
    root = routing_root(model, DOCTOR_SALT)
    different = []
    for sample, messages in SAMPLES.items():
        body = {"model": model, "messages": messages}
        try:
            ours = [int(token) for token in (await renderer.chat(body, root)).token_ids]
            answer = await asyncio.to_thread(request, f"{engine.url}/tokenize", body)
            theirs = answer.json()["tokens"]
        except RenderingError as error:
            return [fail(name, f"{sample}: cannot be rendered here: {error}")]
        except (HttpError, LookupError, TypeError) as error:
            return [fail(name, f"the engine does not tokenize: {error}")]
        if ours != theirs:
            different.append(f"{sample} (from token {_first_difference(ours, theirs)})")
    if different:
        return [
            fail(
                name,
                f"rendered differently: {', '.join(different)}; model.path must hold the tokenizer "
                "and the chat template that the engine uses",
            )
        ]
    return [ok(name, f"{len(SAMPLES)} sample conversations agree")]


def _first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int:
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(ours), len(theirs)))


@dataclass(slots=True)
class _Heard:
    """Collects what an engine says it has stored since `wanted` was set."""

    wanted: tuple[int, ...] = ()
    """Token ids of the prompt that was sent."""
    found: asyncio.Event = field(default_factory=asyncio.Event)
    stored: BlockStored | None = None
    orphans: int = 0
    overcounts: int = 0

    def apply(self, batch: EventBatch) -> None:
        for event in batch.events:
            if isinstance(event, BlockStored) and event.parent_block_hash is None:
                start = tuple(event.token_ids)
                if start and start == self.wanted[: len(start)]:
                    self.stored = event
                    self.found.set()

    def clear(self) -> None:
        """Nothing is kept of earlier blocks."""


async def check_events(
    engine: EngineConfig, paths: RuntimePaths, tokens: Sequence[int], send: asyncio.Future[Any]
) -> list[Finding]:
    """The blocks of the prompt `tokens`, which `send` puts to the engine, are announced."""
    name = f"{engine.id} events flow"
    endpoint = paths.engine_events(engine)
    publisher_binds = engine.publisher_binds
    if not (binds(endpoint) if publisher_binds is None else publisher_binds):
        await send
        return [warn(name, f"{endpoint} is bound by the gateway; see what `gateway` says")]
    heard = _Heard(wanted=tuple(tokens))
    subscriber = EventSubscriber(
        "doctor",
        endpoint,
        paths.engine_replay(engine),
        heard,
        publisher_binds=publisher_binds,
    )
    task = asyncio.create_task(subscriber.run())
    try:
        await send
        async with asyncio.timeout(EVENTS_WITHIN_S):
            await heard.found.wait()
    except TimeoutError:
        problem = subscriber.state().problem or "the endpoint answers, but no block was announced"
        return [
            fail(
                name,
                f"{problem}; gateway and engine must use the same runtime_dir, or the same "
                "`events` and `events_replay` endpoints",
            )
        ]
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    return _judge(engine, heard.stored)


def _judge(engine: EngineConfig, stored: BlockStored | None) -> list[Finding]:
    if stored is None:
        return []
    findings = [ok(f"{engine.id} events flow", f"{len(stored.block_hashes)} new blocks announced")]
    name = f"{engine.id} block size"
    if stored.block_size != engine.block_size:
        findings.append(
            fail(
                name,
                f"the engine's blocks have {stored.block_size} tokens, engines[].block_size says "
                f"{engine.block_size}: make them equal",
            )
        )
    else:
        findings.append(ok(name, f"{stored.block_size} tokens"))
    name = f"{engine.id} salt"
    keys = (stored.extra_keys or [None])[0] or []
    if DOCTOR_SALT in keys:
        findings.append(ok(name, "cache_salt keeps tenants apart in the engine's cache"))
    else:
        findings.append(fail(name, "the engine ignores cache_salt: tenants share its cache"))
    return findings

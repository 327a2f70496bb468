"""The doctor's check of how replicas are found."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass

from gateway.doctor.finding import Finding, fail, ok, warn
from gateway.fleet.discovery import Discovery, discovery_of
from gateway.settings.user_error import UserError
from policies.config import HeadstartConfig
from policies.engine import EngineConfig

WITHIN_S = 15.0
LOOK_S = 0.1
NAME = "discovery"


@dataclass(frozen=True, slots=True)
class FoundReplicas:
    """The replicas that there are, and how they were found."""

    engines: Sequence[EngineConfig]
    finding: Finding | None = None
    """None: the configuration lists them."""


async def find_replicas(config: HeadstartConfig) -> FoundReplicas:
    """Of the configuration, or by its discovery."""
    try:
        discovery = discovery_of(config)
    except UserError as error:
        return FoundReplicas((), fail(NAME, str(error)))
    if discovery is None:
        return FoundReplicas(config.engines)
    engines = await _first_list(discovery)
    if engines is None:
        reason = discovery.problem or f"nothing was found within {WITHIN_S:g} s"
        return FoundReplicas((), fail(NAME, reason))
    if not engines:
        return FoundReplicas((), warn(NAME, "there are no replicas"))
    ids = ", ".join(engine.id for engine in engines)
    return FoundReplicas(engines, ok(NAME, f"{len(engines)} by {_kind(config)}: {ids}"))


def _kind(config: HeadstartConfig) -> str:
    return config.fleet.discovery.kind


async def _first_list(discovery: Discovery) -> Sequence[EngineConfig] | None:
    """None as soon as there is a problem, and when there is none after a while."""
    async with aclosing(discovery.lists()) as lists:
        first = asyncio.ensure_future(anext(lists))
        try:
            async with asyncio.timeout(WITHIN_S):
                while discovery.problem is None:
                    done, _ = await asyncio.wait({first}, timeout=LOOK_S)
                    if done:
                        return first.result()
        except TimeoutError:
            return None
        finally:
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
    return None

"""One attempt at one replica."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest
from replicas import assignment_of, replica_of

from engine_adapter.base import EngineLostError
from gateway.fleet.assignment import Asked, Assignment
from gateway.fleet.dispatch import Dispatcher
from gateway.request.attempt import Attempt
from policies.engine import EngineConfig


class Told:
    """In place of a dispatcher: counts first tokens."""

    def __init__(self) -> None:
        self.count = 0

    def first_token(self, asked: Asked, assignment: Assignment) -> None:
        self.count += 1


def attempt_of(told: Told) -> Attempt:
    replica = replica_of(EngineConfig(url="http://127.0.0.1:9"))
    return Attempt(cast("Dispatcher", told), cast("Asked", None), assignment_of(replica))


async def test_the_first_token_is_told_once_after_what_runs_now() -> None:
    """The piece with it leaves first."""
    told = Told()
    async with attempt_of(told) as attempt:
        attempt.first_token()
        attempt.first_token()
        assert told.count == 0
        await asyncio.sleep(0)
        assert told.count == 1
        attempt.first_token()
    await asyncio.sleep(0)
    assert told.count == 1


@pytest.mark.parametrize("error", [None, EngineLostError("gone")])
async def test_the_first_token_is_told_before_the_attempt_ends(
    error: EngineLostError | None,
) -> None:
    """An answer in one piece ends where it begins: who waits for its blocks must not take it for
    one that failed."""
    told = Told()
    attempt = attempt_of(told)
    await attempt.__aenter__()
    attempt.first_token()
    await attempt.__aexit__(type(error) if error else None, error, None)
    assert told.count == 1
    await asyncio.sleep(0)
    assert told.count == 1

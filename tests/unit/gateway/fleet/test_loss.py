"""Requests that wait for a first byte are set free when their replica is lost."""

from __future__ import annotations

import asyncio

import pytest

from gateway.fleet.loss import Losses, ReplicaLostError


async def test_who_waits_is_told() -> None:
    """At once, with the reason."""
    losses = Losses()

    async def wait() -> None:
        async with losses.lifeline():
            await asyncio.sleep(3600)

    waiting = asyncio.ensure_future(wait())
    await asyncio.sleep(0)
    assert len(losses) == 1
    losses.lose("it stalled")
    with pytest.raises(ReplicaLostError, match="it stalled"):
        await waiting
    assert len(losses) == 0


async def test_an_answer_that_has_begun_comes_to_its_own_end() -> None:
    """A released lifeline holds nothing."""
    losses = Losses()
    async with losses.lifeline() as lifeline:
        lifeline.release()
        losses.lose("gone")
        await asyncio.sleep(0.01)


async def test_a_cancelled_request_is_cancelled() -> None:
    """The client left: that is no loss of a replica."""
    losses = Losses()

    async def wait() -> None:
        async with losses.lifeline():
            await asyncio.sleep(3600)

    waiting = asyncio.ensure_future(wait())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert len(losses) == 0


async def test_an_error_inside_stays_what_it_is() -> None:
    """Also a time-out of the block's own."""
    losses = Losses()
    with pytest.raises(TimeoutError):
        async with losses.lifeline():
            raise TimeoutError
    assert len(losses) == 0

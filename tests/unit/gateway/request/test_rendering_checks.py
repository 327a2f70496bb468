"""Renderings of the right length and the wrong tokens are noticed."""

from __future__ import annotations

import asyncio

from replicas import assignment_of, replica_of

from engine_adapter.base import Prompt
from gateway.accounts.record import Outcome
from gateway.request.answer import PromptTokensDetails, Usage
from gateway.request.call import Call
from gateway.request.rendering_checks import RenderingChecks
from policies.engine import EngineConfig
from prefix_store.base import BlockHash
from prefix_store.hashing import digest
from prefix_store.residency import Holder, Medium, Residency

DEVICE = Holder("engine-0", Medium.DEVICE)


class Stream:
    """An engine's events: how many batches came, None while it is not healthy."""

    def __init__(self) -> None:
        self.batches: int | None = 0

    def progress(self) -> int | None:
        return self.batches


class Rig:
    """Checks on a real index; `verdicts` of all replicas together."""

    def __init__(self, after_s: float = 0.0) -> None:
        self.residency = Residency(1024**2)
        self.stream = Stream()
        self.verdicts: list[bool] = []
        self.checks = RenderingChecks(
            self.residency,
            {"engine-0": self.stream},
            lambda _, confirmed: self.verdicts.append(confirmed),
            after_s=after_s,
        )

    def answered(self, prompt: str, **fields: object) -> list[BlockHash]:
        """A prompt of 40 tokens in blocks of 32 has been answered; its block's hash."""
        hashes = [digest(prompt)]
        self.residency.see(hashes)
        self.checks.consider(call_of(hashes, **fields))  # type: ignore[arg-type]
        return hashes

    async def settled(self) -> None:
        async with asyncio.timeout(10):
            while len(self.checks):  # noqa: ASYNC110 - verdicts have no event
                await asyncio.sleep(0.001)


def call_of(
    hashes: list[BlockHash],
    *,
    cached: int | None = 0,
    outcome: Outcome = Outcome.OK,
    engine_tokens: int = 40,
    replica: str = "engine-0",
) -> Call:
    return Call(
        "r",
        32,
        prompt=Prompt(40, hashes, []),
        assignment=assignment_of(replica_of(EngineConfig(id=replica), holders=(DEVICE,))),
        usage=Usage(engine_tokens, 1, PromptTokensDetails(cached)),
        outcome=outcome,
    )


async def test_a_computed_prompt_that_nobody_announces_is_a_suspicion() -> None:
    """Its events may come after the answer; then it is confirmed."""
    rig = Rig()
    right = rig.answered("right")
    rig.residency.store(DEVICE, None, right)
    rig.stream.batches = 1
    await rig.settled()
    assert rig.verdicts == [True]
    rig.answered("wrong")
    rig.residency.store(DEVICE, None, [digest("what the engine made of it")])
    rig.stream.batches = 2
    await rig.settled()
    assert rig.verdicts == [True, False]


async def test_blocks_that_are_gone_again_were_confirmed_all_the_same() -> None:
    """A small device may evict them before anybody looks."""
    rig = Rig()
    hashes = rig.answered("right")
    rig.residency.store(DEVICE, None, hashes)
    rig.residency.clear(DEVICE)
    rig.stream.batches = 2
    await rig.settled()
    assert rig.verdicts == [True]


async def test_of_a_silent_or_broken_stream_nothing_is_said() -> None:
    """No event since the last verdict, or events that may be lost here."""
    rig = Rig()
    for batches in (0, None):
        rig.stream.batches = batches
        rig.answered(f"a {batches}")
        await rig.settled()
    rig.stream.batches = 7
    rig.answered("b")
    await rig.settled()
    rig.answered("c")
    await rig.settled()
    assert rig.verdicts == [False]


async def test_what_the_index_forgot_is_no_suspicion() -> None:
    """It cannot tell."""
    rig = Rig()
    rig.stream.batches = 1
    rig.checks.consider(call_of([digest("never seen here")]))
    await rig.settled()
    assert rig.verdicts == []


async def test_only_prompts_that_were_computed_in_full_are_sampled() -> None:
    """A hit, a failure, another length, too short a prompt, an engine without events."""
    rig = Rig(after_s=3600)
    rig.answered("a", cached=32)
    rig.answered("a", cached=None)
    rig.answered("a", outcome=Outcome.CANCELLED)
    rig.answered("a", engine_tokens=41)
    rig.answered("a", replica="engine-1")
    rig.checks.consider(call_of([]))
    assert len(rig.checks) == 0
    rig.answered("a")
    rig.answered("b")
    assert len(rig.checks) == 1
    rig.checks.close()
    assert len(rig.checks) == 0

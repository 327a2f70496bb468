"""One look at a replica: what the condition and the watcher are told of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from engine_adapter.base import (
    EngineAdapterError,
    EngineLostError,
    EngineRefusedError,
    EngineTimeoutError,
    EngineUnreachableError,
)
from engine_adapter.engine_gauges import EngineGauges
from gateway.fleet.activity import Activity
from gateway.fleet.condition import Condition
from gateway.fleet.health_checks import HealthCheck
from policies.fleet import HealthConfig

BUSY = EngineGauges(
    running=3, waiting=2, kv_free=0.25, kv_tokens=4096, generated_tokens=10.0, started_at=5.0
)


@dataclass
class Engine:
    """A replica as its check sees it; answers as its fields say."""

    config: HealthConfig = field(default_factory=HealthConfig)
    now: float = 1000.0
    status: int | EngineAdapterError = 200
    page: EngineGauges | None = BUSY
    computes: EngineAdapterError | None = None
    asked: list[str] = field(default_factory=list)
    polled_thrice: asyncio.Event = field(default_factory=asyncio.Event)
    polls: list[EngineGauges] = field(default_factory=list)
    restarts: int = 0
    lost_at_restart: bool = False
    activity: Activity = field(default_factory=Activity)
    condition: Condition = field(init=False)
    check: HealthCheck = field(init=False)

    def __post_init__(self) -> None:
        def clock() -> float:
            return self.now

        self.condition = Condition(self.config, clock, others_settled=lambda: False)
        self.check = HealthCheck(
            self, self.condition, self.activity, self, self.config, clock=clock, jitter=lambda: 0.5
        )

    async def health(self, timeout_s: float) -> int:
        self.asked.append("health")
        if isinstance(self.status, EngineAdapterError):
            raise self.status
        return self.status

    async def gauges(self, timeout_s: float) -> EngineGauges | None:
        self.asked.append("gauges")
        return self.page

    async def compute(self, timeout_s: float) -> None:
        self.asked.append("compute")
        if self.computes is not None:
            raise self.computes

    def polled(self, gauges: EngineGauges) -> None:
        self.polls.append(gauges)
        if len(self.polls) == 3:
            self.polled_thrice.set()

    def restarted(self) -> None:
        self.restarts += 1
        self.lost_at_restart = self.condition.is_lost

    async def looks(
        self, gauges: Sequence[EngineGauges | None] = (), *, every_s: float = 1
    ) -> None:
        """Several looks, each with a page of its own."""
        for page in gauges or (self.page,):
            self.page = page
            await self.check.look()
            self.now += every_s


async def test_a_healthy_replica_gets_ready_and_its_gauges_are_told():
    """/health first, then /metrics."""
    engine = Engine()
    await engine.looks()
    assert engine.condition.accepts
    assert engine.asked == ["health", "gauges"]
    assert engine.polls == [BUSY]
    assert engine.restarts == 0


async def test_a_replica_without_gauges_is_healthy():
    """Nothing is told of it."""
    engine = Engine(page=None)
    await engine.looks()
    assert engine.condition.accepts
    assert engine.polls == []


@pytest.mark.parametrize(
    ("status", "looks", "reason"),
    [
        (EngineRefusedError("x"), 1, "nothing listens at its address"),
        (EngineTimeoutError("x"), 3, "no answer to /health within 3 s, 3 times in a row"),
        (EngineUnreachableError("no route"), 3, "no answer to /health: no route, 3 times in a row"),
        (EngineLostError("broke off"), 3, "no answer to /health: broke off, 3 times in a row"),
        (503, 3, "/health answers 503, 3 times in a row"),
    ],
)
async def test_what_ejects_a_replica_and_after_how_many_looks(status, looks, reason):
    """A refused connection at once, everything else when it comes again and again."""
    engine = Engine()
    await engine.looks()
    engine.status = status
    for _ in range(looks):
        assert engine.condition.accepts
        await engine.looks()
    assert engine.condition.is_lost
    assert engine.condition.reason == reason
    assert len(engine.polls) == 1
    engine.status = 200
    await engine.looks()
    assert engine.condition.accepts


async def test_a_restart_is_told_before_the_replica_is_back():
    """What its predecessor held must not count for the first request that is routed."""
    engine = Engine()
    await engine.looks()
    engine.status = EngineRefusedError("x")
    await engine.looks()
    engine.status, engine.page = 200, EngineGauges(running=0, waiting=0, started_at=6.0)
    await engine.looks()
    assert engine.condition.accepts
    assert (engine.restarts, engine.lost_at_restart) == (1, True)
    await engine.looks()
    assert engine.restarts == 1


async def test_a_restart_that_no_look_saw_is_noticed():
    """Between two looks, or while the replica does not say when it started."""
    engine = Engine()
    await engine.looks([EngineGauges(started_at=5.0), EngineGauges(started_at=6.0)])
    assert engine.restarts == 1
    await engine.looks([EngineGauges(), EngineGauges(started_at=6.0), None, None])
    assert engine.restarts == 1
    await engine.looks([EngineGauges(started_at=7.0)])
    assert engine.restarts == 2


async def test_a_replica_that_has_requests_and_does_not_move_is_ejected():
    """After `stall` seconds without a byte and without a change of its gauges."""
    engine = Engine()
    await engine.looks()
    engine.activity.began(engine.now)
    await engine.looks([BUSY] * 60)
    assert engine.condition.accepts
    await engine.looks()
    assert engine.condition.is_lost
    assert engine.condition.reason == "not a byte came for 60 s, with 1 in flight"


async def test_a_replica_without_requests_may_be_silent():
    """Also one whose requests have ended."""
    engine = Engine()
    engine.activity.began(engine.now)
    await engine.looks()
    engine.activity.ended()
    await engine.looks([BUSY] * 200)
    assert engine.condition.accepts


async def test_a_replica_whose_bytes_come_does_not_stall():
    """However long its answers take."""
    engine = Engine()
    engine.activity.began(engine.now)
    for _ in range(200):
        engine.activity.moved_at = engine.now
        await engine.looks()
    assert engine.condition.accepts


async def test_work_that_only_the_gauges_show_is_no_stall():
    """A long prompt takes KV memory, an answer in one piece generates tokens: no byte comes."""
    engine = Engine()
    engine.activity.began(engine.now)
    pages = [EngineGauges(running=1, waiting=0, kv_free=1 - step / 100) for step in range(90)]
    await engine.looks(pages)
    assert engine.condition.accepts
    pages = [EngineGauges(running=1, waiting=0, generated_tokens=step) for step in range(90)]
    await engine.looks(pages)
    assert engine.condition.accepts


async def test_a_stalled_replica_is_back_when_it_computes_a_token():
    """/health alone, which answers 200 all the time, does not bring it back."""
    engine = Engine(computes=EngineTimeoutError("no token within 60 s"))
    await engine.looks()
    engine.activity.began(engine.now)
    await engine.looks([BUSY] * 61)
    assert engine.condition.is_lost
    assert "compute" not in engine.asked
    await engine.looks([BUSY] * 100)
    assert engine.condition.reason == "stalled, and does not compute: no token within 60 s"
    assert engine.condition.ejections == 1
    engine.computes = None
    await engine.looks()
    assert engine.condition.accepts
    asked = len(engine.asked)
    await engine.looks([BUSY] * 30)
    assert engine.condition.accepts  # its silence began anew
    assert "compute" not in engine.asked[asked:]


def test_silence_begins_with_the_first_request():
    """Later requests do not end it; the next first one does."""
    activity = Activity()
    assert activity.silent_s(5.0) == 0.0
    activity.began(10.0)
    activity.began(40.0)
    assert activity.silent_s(70.0) == 60.0
    activity.moved_at = 71.0
    assert activity.silent_s(75.0) == 4.0
    activity.ended()
    activity.ended()
    assert activity.silent_s(500.0) == 0.0
    activity.began(500.0)
    assert activity.silent_s(501.0) == 1.0


async def test_the_check_looks_at_once_and_goes_on_until_it_is_cancelled():
    """Its owner runs it as a task."""
    engine = Engine(HealthConfig(interval=0.001))
    task = asyncio.create_task(engine.check.run())
    async with asyncio.timeout(10):
        await engine.polled_thrice.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()

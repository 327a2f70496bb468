"""Replicas behind a name: what becomes of addresses, and what is believed of a resolver."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

import pytest
from discovered import Listener
from waiting import until

from gateway.fleet.discovery.dns import JITTER, DnsDiscovery
from policies import fleet
from policies.engine import EngineConfig

ENGINE = EngineConfig(events="tcp://{ip}:5557", events_replay="tcp://{ip}:5558")


class Resolver:
    """Answers what the test says, and counts."""

    def __init__(self, *addresses: str) -> None:
        self.addresses: Sequence[str] = addresses
        self.error: Exception | None = None
        self.hangs: asyncio.Event | None = None
        self.asked = 0

    async def __call__(self, name: str) -> Sequence[str]:
        self.asked += 1
        if self.hangs is not None:
            await self.hangs.wait()
        if self.error is not None:
            raise self.error
        return self.addresses


class Steps:
    """A discovery whose time passes when the test lets it."""

    def __init__(self, resolver: Resolver, **keys: object) -> None:
        self.now = 0.0
        self.pauses: list[float] = []
        self._go = asyncio.Semaphore(0)
        settings = fleet.DnsDiscovery.model_validate({"name": "vllm", "engine": ENGINE, **keys})
        discovery = DnsDiscovery(
            settings, resolve=resolver, pause=self._pause, clock=lambda: self.now
        )
        self.listener = Listener(discovery)

    async def look(self, seconds: float = 0.0) -> None:
        """Once more, after so long."""
        self.now += seconds
        count = len(self.pauses)
        self._go.release()
        await until(lambda: len(self.pauses) > count)

    async def _pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        await self._go.acquire()


async def test_addresses_become_replicas() -> None:
    """IPv6 in brackets; twice the same is one; what others cannot reach is none."""
    resolver = Resolver("10.0.0.1", "fd00::0:1", "10.0.0.1", "fe80::1%eth0")
    steps = Steps(resolver, port=9000)
    async with steps.listener.listening() as listener:
        await listener.urls(1)
    (engines,) = listener.lists
    assert [(each.id, each.url, each.events, each.events_replay) for each in engines] == [
        ("10.0.0.1:9000", "http://10.0.0.1:9000", "tcp://10.0.0.1:5557", "tcp://10.0.0.1:5558"),
        ("[fd00::1]:9000", "http://[fd00::1]:9000", "tcp://[fd00::1]:5557", "tcp://[fd00::1]:5558"),
    ]
    assert all(each.publisher_binds for each in engines)
    for each in engines:  # as if somebody had written it
        assert EngineConfig.model_validate(each.model_dump()) == each


async def test_no_addresses_are_believed_when_it_lasts() -> None:
    """A resolver that has just started, and a service without replicas, answer alike."""
    resolver = Resolver("10.0.0.1")
    steps = Steps(resolver, empty_after=60)
    async with steps.listener.listening() as listener:
        await until(lambda: len(steps.pauses) == 1)
        resolver.addresses = ()
        for _ in range(3):
            await steps.look(20)
        assert "there are none, which is believed after 60 s" in await listener.problem()
        resolver.addresses = ("10.0.0.1",)
        await steps.look(20)
        resolver.addresses = ()
        for _ in range(3):
            await steps.look(20)
        assert len(listener.lists) == 1, "the time begins anew after another answer"
        await steps.look(20)
        assert listener.lists[1:] == [[]]
        assert listener.discovery.problem is None


async def test_a_failure_is_never_believed_to_be_an_empty_fleet() -> None:
    """However long it lasts: who cannot ask does not know."""
    resolver = Resolver("10.0.0.1")
    steps = Steps(resolver, empty_after=60)
    async with steps.listener.listening() as listener:
        await until(lambda: len(steps.pauses) == 1)
        for error in (
            socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"),
            UnicodeError("label too long"),
        ):
            resolver.error = error
            for _ in range(4):
                await steps.look(1000)
            assert str(error.args[-1]) in await listener.problem()
        assert len(listener.lists) == 1


async def test_a_resolver_that_hangs_is_asked_once() -> None:
    """Each look-up holds a thread: they must not pile up."""
    resolver = Resolver("10.0.0.1")
    resolver.hangs = asyncio.Event()
    steps = Steps(resolver, timeout=0.01)
    async with steps.listener.listening() as listener:
        assert await listener.problem() == "no answer within 0.01 s"
        for _ in range(3):
            await steps.look()
        assert resolver.asked == 1
        resolver.hangs.set()
        await steps.look()
        assert await listener.urls(1) == {"http://10.0.0.1:8000"}
        await steps.look()
        assert resolver.asked == 2


async def test_a_look_up_that_hangs_ends_with_the_discovery() -> None:
    """It is nobody's any more."""
    resolver = Resolver()
    resolver.hangs = asyncio.Event()
    before = asyncio.all_tasks()
    steps = Steps(resolver, timeout=60)
    async with steps.listener.listening():
        await until(lambda: resolver.asked == 1)
    assert asyncio.all_tasks() == before


async def test_gateways_do_not_ask_in_step() -> None:
    """The pauses differ, and none is far from what was asked for."""
    steps = Steps(Resolver("10.0.0.1"), interval=10)
    async with steps.listener.listening():
        await until(lambda: len(steps.pauses) == 1)
        for _ in range(20):
            await steps.look()
    assert len(set(steps.pauses)) > 1
    assert all(10 * (1 - JITTER) <= each <= 10 * (1 + JITTER) for each in steps.pauses)


@pytest.mark.parametrize(
    ("name", "family", "urls"),
    [
        ("127.0.0.1", "any", {"http://127.0.0.1:8000"}),
        ("::1", "ipv6", {"http://[::1]:8000"}),
        ("127.0.0.1", "ipv6", set()),
    ],
)
async def test_the_resolver_of_the_host_is_asked(name: str, family: str, urls: set[str]) -> None:
    """With the family that is wanted; that there are no such addresses is an answer."""
    settings = fleet.DnsDiscovery.model_validate(
        {"name": name, "family": family, "empty_after": 0, "engine": ENGINE}
    )
    async with Listener(DnsDiscovery(settings)).listening() as listener:
        assert await listener.urls(1) == urls

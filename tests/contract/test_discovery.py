"""What every discovery does, whatever it asks."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Protocol

import pytest
from discovered import Listener, short_pause
from fake_cluster import FakeCluster, endpoint
from waiting import until

from gateway.fleet.discovery import Discovery
from gateway.fleet.discovery.cluster_api import ClusterAccess
from gateway.fleet.discovery.dns import DnsDiscovery
from gateway.fleet.discovery.file import FileDiscovery
from gateway.fleet.discovery.kubernetes import KubernetesDiscovery
from policies import fleet
from policies.config import HeadstartConfig
from policies.engine import EngineConfig

ENGINE = EngineConfig(report_events=False, max_running=7)
ONE, TWO, THREE = "10.0.0.1", "10.0.0.2", "10.0.0.3"


class World(Protocol):
    """Where replicas come and go."""

    discovery: Discovery

    def has(self, *addresses: str) -> None:
        """These and no others, from now on; whatever was broken works again."""

    def breaks(self) -> None:
        """Nothing can be asked from now on."""

    def connections(self) -> int:
        """That are open to whoever is asked."""


class InFile:
    """A file of this host."""

    def __init__(self, path: Path) -> None:
        self._path = path
        settings = fleet.FileDiscovery(path=str(path), engine=ENGINE)
        self.discovery: Discovery = FileDiscovery(settings, HeadstartConfig(), poll_s=0.005)

    def has(self, *addresses: str) -> None:
        entries = [{"id": each, "url": f"http://{each}:8000"} for each in addresses]
        self._replace(json.dumps(entries))

    def breaks(self) -> None:
        self._replace("- {id: [")

    def connections(self) -> int:
        return 0

    def _replace(self, text: str) -> None:
        new = self._path.with_suffix(".new")
        new.write_text(text)
        os.replace(new, self._path)


class InDns:
    """A resolver."""

    def __init__(self) -> None:
        self._addresses: Sequence[str] | None = ()
        settings = fleet.DnsDiscovery(name="vllm", engine=ENGINE, empty_after=0)
        self.discovery: Discovery = DnsDiscovery(settings, resolve=self._resolve, pause=short_pause)

    def has(self, *addresses: str) -> None:
        self._addresses = addresses

    def breaks(self) -> None:
        self._addresses = None

    def connections(self) -> int:
        return 0

    async def _resolve(self, name: str) -> Sequence[str]:
        assert name == "vllm"
        if self._addresses is None:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return self._addresses


class InKubernetes:
    """An API server, which tells what changes."""

    def __init__(self, cluster: FakeCluster) -> None:
        self._cluster = cluster
        settings = fleet.KubernetesDiscovery(selector="app=vllm", engine=ENGINE)
        access = ClusterAccess(cluster.url, "models")
        self.discovery: Discovery = KubernetesDiscovery(settings, access, pause=short_pause)

    def has(self, *addresses: str) -> None:
        self._cluster.is_broken = False
        self._cluster.put("vllm-abc", [endpoint(each) for each in addresses])

    def breaks(self) -> None:
        self._cluster.is_broken = True
        self._cluster.write(None)

    def connections(self) -> int:
        return self._cluster.num_watches


Open = Callable[[], AbstractAsyncContextManager[World]]


@pytest.fixture(params=["file", "dns", "kubernetes"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """Opens the world of one kind."""

    @asynccontextmanager
    async def open_world() -> AsyncIterator[World]:
        if request.param == "file":
            yield InFile(tmp_path / "replicas.yaml")
        elif request.param == "dns":
            yield InDns()
        else:
            async with FakeCluster().running() as cluster:
                yield InKubernetes(cluster)

    return open_world


def at(*addresses: str) -> set[str]:
    """Where these replicas are."""
    return {f"http://{each}:8000" for each in addresses}


async def test_the_first_list_has_all_replicas_with_what_they_have_in_common(opened: Open) -> None:
    """Whoever listens needs nothing else to use them."""
    async with opened() as world:
        world.has(ONE, TWO)
        async with Listener(world.discovery).listening() as listener:
            assert await listener.urls(1) == at(ONE, TWO)
            (engines,) = listener.lists
    assert len({engine.id for engine in engines}) == 2
    assert {engine.max_running for engine in engines} == {7}
    assert not any(engine.report_events for engine in engines)


async def test_a_change_is_told_once_and_another_order_is_none(opened: Open) -> None:
    """Each list makes replicas come and go: none may say nothing."""
    async with opened() as world:
        world.has(ONE, TWO)
        async with Listener(world.discovery).listening() as listener:
            assert await listener.urls(1) == at(ONE, TWO)
            world.has(ONE, TWO, THREE)
            assert await listener.urls(2) == at(ONE, TWO, THREE)
            world.has(THREE, TWO, ONE)
            await asyncio.sleep(0.05)
            world.has(THREE)
            assert await listener.urls(3) == at(THREE)
            assert len(listener.lists) == 3


async def test_that_there_are_none_is_an_answer(opened: Open) -> None:
    """A fleet may be scaled to nothing and back."""
    async with opened() as world:
        world.has(ONE)
        async with Listener(world.discovery).listening() as listener:
            assert await listener.urls(1) == at(ONE)
            world.has()
            assert await listener.urls(2) == set()
            world.has(TWO)
            assert await listener.urls(3) == at(TWO)


async def test_a_failure_keeps_the_last_list_and_says_why_once(
    opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    """What cannot be asked has not changed."""
    caplog.set_level(logging.INFO)
    async with opened() as world:
        world.has(ONE)
        async with Listener(world.discovery).listening() as listener:
            assert await listener.urls(1) == at(ONE)
            world.breaks()
            reason = await listener.problem()
            await asyncio.sleep(0.05)
            assert len(listener.lists) == 1
            world.has(ONE, TWO)
            assert await listener.urls(2) == at(ONE, TWO)
            await until(lambda: world.discovery.problem is None)
    warnings = [each for each in caplog.messages if reason in each]
    assert len(warnings) == 1
    assert "the replicas stay as they are" in warnings[0]
    assert [each for each in caplog.messages if "works again" in each]


async def test_a_failure_at_the_start_is_waited_for(opened: Open) -> None:
    """The gateway may be there before whoever knows the replicas."""
    async with opened() as world:
        world.breaks()
        async with Listener(world.discovery).listening() as listener:
            await listener.problem()
            assert not listener.lists
            world.has(ONE)
            assert await listener.urls(1) == at(ONE)


async def test_it_leaves_nothing_behind_when_it_is_cancelled(opened: Open) -> None:
    """Neither task nor connection."""
    async with opened() as world:
        world.has(ONE)
        before = asyncio.all_tasks()
        async with Listener(world.discovery).listening() as listener:
            await listener.urls(1)
            world.has(TWO)
            await listener.urls(2)
        await until(lambda: world.connections() == 0)
        await until(lambda: asyncio.all_tasks() <= before)


async def test_it_may_be_asked_anew(opened: Open) -> None:
    """As when the task that follows it is started again: the first list is complete again."""
    async with opened() as world:
        world.has(ONE)
        for _ in range(2):
            async with Listener(world.discovery).listening() as listener:
                assert await listener.urls(1) == at(ONE)

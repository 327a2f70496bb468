"""A gateway whose replicas are discovered, on simulated engines."""

from __future__ import annotations

import asyncio
import json
import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_cluster import FakeCluster, endpoint
from live_stack import free_ports
from simulated_fleet import BLOCK_SIZE, SimulatedFleet, open_fleet


@pytest.fixture
def root() -> Iterator[Path]:
    """For sockets, whose paths must be short."""
    with tempfile.TemporaryDirectory(prefix="hs-") as path:
        yield Path(path)


def prompt(seed: int, num_tokens: int = 640) -> list[int]:
    chooser = random.Random(seed)
    return [chooser.randrange(300, 30_000) for _ in range(num_tokens)]


async def found(fleet: SimulatedFleet, *replicas: str) -> None:
    """Until the gateway has these replicas and no others, and knows exactly what they hold."""
    async with asyncio.timeout(20):
        while set((await fleet.stats()).replicas) != set(replicas):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    await fleet.exact()


async def reuses(fleet: SimulatedFleet, seed: int = 0) -> None:
    """What was computed is found again, and that was known before."""
    await fleet.ask(prompt(seed))
    again = await fleet.ask(prompt(seed) + prompt(seed + 100, 64))
    assert again.evidence == "exact"
    assert again.cached_tokens == again.device_tokens(str(again.replica)) == 640


async def test_replicas_come_and_go_with_the_lines_of_a_file(root: Path) -> None:
    """The gateway starts without any."""
    path = root / "replicas.yaml"
    listed = {"kind": "file", "path": str(path), "engine": {"block_size": BLOCK_SIZE}}
    async with open_fleet(
        root, 2, ports=free_ports(3), engines=[{}], fleet={"discovery": listed}
    ) as fleet:
        entries = [
            {
                "id": f"r{i}",
                "url": engine.url,
                "events": f"ipc://{root}/e{i}",
                "events_replay": f"ipc://{root}/p{i}",
            }
            for i, engine in enumerate(fleet.engines)
        ]
        assert (await fleet.ask(prompt(9))).status == 503
        for seed, wanted in enumerate((entries[:1], entries, entries[1:])):
            new = root / "new.yaml"
            new.write_text(json.dumps(wanted))
            os.replace(new, path)
            await found(fleet, *(entry["id"] for entry in wanted))
            await reuses(fleet, seed)
        assert (await fleet.ask(prompt(9))).replica == "r1"


@pytest.mark.parametrize("kind", ["dns", "kubernetes"])
async def test_replicas_on_other_hosts_bind_their_events(root: Path, kind: str) -> None:
    """They are reached over TCP at the address that was found."""
    *ports, events, replay = free_ports(4)
    engine = {
        "block_size": BLOCK_SIZE,
        "events": f"tcp://{{ip}}:{events}",
        "events_replay": f"tcp://{{ip}}:{replay}",
    }
    options = {"events": f"tcp://*:{events}", "replay": f"tcp://*:{replay}"}
    async with FakeCluster().running() as cluster:
        cluster.put("vllm-abc", [endpoint("127.0.0.1", pod="vllm-0")])
        place = {
            "dns": {"name": "127.0.0.1"},
            "kubernetes": {"server": cluster.url, "selector": "app=vllm"},
        }
        listed = {"kind": kind, "port": ports[0], "engine": engine, **place[kind]}
        async with open_fleet(
            root, 1, ports=ports, options=options, engines=[{}], fleet={"discovery": listed}
        ) as fleet:
            name = {"dns": f"127.0.0.1:{ports[0]}", "kubernetes": "vllm-0"}[kind]
            await found(fleet, name)
            await reuses(fleet)

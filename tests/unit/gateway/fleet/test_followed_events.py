"""Streams of engines and stores over real sockets, while engines come and go."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import zmq
from waiting import until

from engine_adapter.load_reports import LoadReports
from gateway.fleet.followed_events import FollowedEvents
from policies.config import HeadstartConfig
from policies.engine import EngineConfig
from policies.routing.base import Evidence
from prefix_store.base import BlockHash
from prefix_store.event_publisher import EventPublisher
from prefix_store.events import REPORT_SESSION, BlocksLoaded, BlockStored, KVEvent
from prefix_store.hashing import as_token_ids, extend_chain, routing_root
from prefix_store.residency import Holder, Medium, Residency
from prefix_store.runtime_dir import RuntimePaths

BLOCK = 4
MIB = 1024**2


def tokens(num_blocks: int) -> list[int]:
    return list(range(num_blocks * BLOCK))


def chain(num_blocks: int, model: str = "m") -> list[BlockHash]:
    return extend_chain(routing_root(model, ""), as_token_ids(tokens(num_blocks)), BLOCK)


class Publisher:
    """What an engine or a store has: always a run of one prompt. It can die and come back."""

    def __init__(self, events: str, replay: str) -> None:
        self.events, self.replay = events, replay
        self.num_blocks = 0
        self._publisher: EventPublisher | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def publisher(self) -> EventPublisher:
        assert self._publisher is not None
        return self._publisher

    def start(self) -> None:
        self.num_blocks = 0
        self._publisher = EventPublisher(self.events, self.replay, snapshot=self._snapshot)
        self._task = asyncio.create_task(self._publisher.run())

    def has(self, num_blocks: int, **fields: Any) -> None:
        """From now on it holds so many blocks."""
        self.num_blocks = num_blocks
        self.publisher.publish([self._stored(**fields)])

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self.publisher.close()
        self._task = self._publisher = None

    async def _snapshot(self) -> list[KVEvent]:
        return [self._stored()]

    def _stored(self, **fields: Any) -> BlockStored:
        names: list[bytes | int] = list(range(self.num_blocks))
        return BlockStored(names, None, tokens(self.num_blocks), BLOCK, **fields)


class Rig:
    """A gateway's index with the streams that feed it."""

    def __init__(self, directory: Path, **config: Any) -> None:
        config = {"model": {"name": "m"}, "store": None, "runtime_dir": str(directory), **config}
        self.config = HeadstartConfig.model_validate(config)
        self.paths = RuntimePaths.of(self.config)
        self.residency = Residency(MIB)
        self.loads = LoadReports()
        self.followed = FollowedEvents(
            self.config,
            self.paths,
            block_size=BLOCK,
            residency=self.residency,
            loads=self.loads,
        )
        self._publishers: list[Publisher] = []

    def engine(self, engine_id: str, **fields: Any) -> EngineConfig:
        return EngineConfig.model_validate({"id": engine_id, "block_size": BLOCK, **fields})

    def publisher(self, engine: EngineConfig) -> Publisher:
        """The engine's own end, running."""
        return self.publisher_at(self.paths.engine_events(engine), self.paths.engine_replay(engine))

    def publisher_at(self, events: str, replay: str) -> Publisher:
        publisher = Publisher(events, replay)
        publisher.start()
        self._publishers.append(publisher)
        return publisher

    def run(self, source: str, medium: Medium = Medium.DEVICE, model: str = "m") -> int:
        match = self.residency.match(chain(20, model))
        return match.by_holder.get(Holder(source, medium), 0)

    def connection_of(self, engine_id: str) -> Callable[[], bool]:
        return lambda: self.followed.engines[engine_id].subscriber.is_connected

    def is_exact(self, engine_id: str) -> bool:
        return self.followed.evidence(engine_id) is Evidence.EXACT

    async def close(self) -> None:
        for publisher in self._publishers:
            await publisher.stop()


@contextlib.asynccontextmanager
async def rig_in(directory: Path, **config: Any) -> AsyncIterator[Rig]:
    rig = Rig(directory, **config)
    try:
        async with rig.followed:
            yield rig
    finally:
        await rig.close()


async def test_engines_come_and_go_at_run_time(tmp_path: Path) -> None:
    """Each with its own stream; one that goes takes along what it held, and its bit is free."""
    async with rig_in(tmp_path) as rig:
        one, two = rig.engine("one"), rig.engine("two")
        first, second = rig.publisher(one), rig.publisher(two)
        rig.followed.add(one)
        first.has(3)
        await until(lambda: rig.run("one") == 3)
        second.has(5)
        rig.followed.add(two)
        await until(lambda: rig.run("two") == 5)
        await until(lambda: rig.is_exact("one") and rig.is_exact("two"))
        await rig.followed.remove("one")
        assert rig.residency.match(chain(5)).by_holder == {Holder("two", Medium.DEVICE): 5}
        assert rig.residency.stats().resident_blocks.keys() == {Holder("two", Medium.DEVICE)}
        assert rig.followed.engines.keys() == {"two"}
        assert not rig.is_exact("one")
        first.has(4)
        second.has(6)
        await until(lambda: rig.run("two") == 6)
        assert rig.run("one") == 0


async def test_engine_that_comes_back_is_learned_from_the_start(tmp_path: Path) -> None:
    """What it has now, not what it had when it was removed."""
    async with rig_in(tmp_path) as rig:
        engine = rig.engine("one")
        publisher = rig.publisher(engine)
        rig.followed.add(engine)
        publisher.has(5)
        await until(lambda: rig.run("one") == 5)
        await rig.followed.remove("one")
        await publisher.stop()
        publisher.start()
        publisher.has(2)
        rig.followed.add(engine)
        await until(lambda: rig.run("one") == 2 and rig.is_exact("one"))


async def test_id_that_is_given_to_another_engine_inherits_nothing(tmp_path: Path) -> None:
    """Another endpoint, maybe another model; the old one may still talk."""
    async with rig_in(tmp_path, more_models=[{"name": "other"}]) as rig:
        old = rig.engine("one")
        new = rig.engine(
            "one",
            model="other",
            events=f"ipc://{tmp_path}/new",
            events_replay=f"ipc://{tmp_path}/new-replay",
        )
        former, latter = rig.publisher(old), rig.publisher(new)
        rig.followed.add(old)
        former.has(5)
        await until(lambda: rig.run("one") == 5)
        await rig.followed.remove("one")
        rig.followed.add(new)
        former.has(6)
        latter.has(3)
        await until(lambda: rig.run("one", model="other") == 3)
        assert rig.run("one") == 0


async def test_socket_that_we_bind_is_free_for_the_next_engine(tmp_path: Path) -> None:
    """vLLM connects to endpoints that are no wildcards; `remove` returns when ours is closed."""
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    async with rig_in(tmp_path) as rig:
        for name in ("one", "two", "one"):
            rig.followed.add(rig.engine(name, events=endpoint, events_replay=f"ipc://{tmp_path}/r"))
            with zmq.Context() as context, context.socket(zmq.PUB) as engine:
                engine.linger = 0
                engine.connect(endpoint)
                await until(rig.connection_of(name))
            await rig.followed.remove(name)
        assert rig.followed.engines == {}


def free_port() -> int:
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def test_removing_the_unknown_is_harmless(tmp_path: Path) -> None:
    """Whoever removes replicas need not know whether they were followed."""
    async with rig_in(tmp_path) as rig:
        await rig.followed.remove("nobody")
        rig.followed.restarted("nobody")
        rig.followed.answered("nobody", chain(2), 0.0)
        assert rig.followed.learned("nobody") is None
        assert rig.followed.evidence("nobody") is Evidence.APPROXIMATE


async def test_without_events_an_engine_holds_what_was_sent_to_it(tmp_path: Path) -> None:
    """Until it expires, or the engine is a new one."""
    approximate = {"expiry": "10s", "max_tokens": 6 * BLOCK}
    async with rig_in(tmp_path, fleet={"approximate": approximate}) as rig:
        rig.followed.add(rig.engine("mute", report_events=False))
        assert rig.followed.engines == {}
        assert rig.followed.evidence("mute") is Evidence.APPROXIMATE
        assert rig.followed.learned("mute") is None
        rig.followed.answered("mute", chain(4), now=0.0)
        assert rig.run("mute") == 4
        rig.followed.tick(9.0)
        assert rig.run("mute") == 4
        rig.followed.tick(10.0)
        assert rig.run("mute") == 0
        rig.followed.answered("mute", chain(20), now=11.0)
        assert rig.run("mute") == 6
        rig.followed.restarted("mute")
        assert rig.run("mute") == 0
        rig.followed.answered("mute", chain(2), now=12.0)
        await rig.followed.remove("mute")
        assert rig.residency.stats().resident_blocks == {}


async def test_exact_stream_needs_no_notes(tmp_path: Path) -> None:
    """What was sent says nothing that the events do not say better."""
    async with rig_in(tmp_path) as rig:
        engine = rig.engine("one")
        publisher = rig.publisher(engine)
        rig.followed.add(engine)
        publisher.has(2)
        await until(lambda: rig.run("one") == 2 and rig.is_exact("one"))
        rig.followed.answered("one", chain(8), now=0.0)
        assert rig.run("one") == 2


async def test_while_a_stream_is_cut_what_was_sent_fills_the_gap(tmp_path: Path) -> None:
    """Both count meanwhile, and are labelled as a guess; when the stream is whole again it tells
    the truth, also that the engine is another one."""
    async with rig_in(tmp_path) as rig:
        engine = rig.engine("one")
        publisher = rig.publisher(engine)
        rig.followed.add(engine)
        publisher.has(3)
        await until(lambda: rig.run("one") == 3 and rig.is_exact("one"))
        await publisher.stop()
        await until(lambda: not rig.is_exact("one"))
        rig.followed.answered("one", chain(7), now=0.0)
        rig.followed.tick(1.0)
        assert rig.run("one") == 7
        assert rig.followed.evidence("one") is Evidence.APPROXIMATE
        publisher.start()
        publisher.has(4)
        await until(lambda: rig.is_exact("one"))
        rig.followed.tick(2.0)
        assert rig.run("one") == 4


async def test_what_a_cut_stream_told_is_not_believed_for_ever(tmp_path: Path) -> None:
    """After the time for which what was sent is believed it goes as well, and comes back with the
    stream."""
    async with rig_in(tmp_path, fleet={"approximate": {"expiry": "10s"}}) as rig:
        engine = rig.engine("one")
        publisher = rig.publisher(engine)
        rig.followed.add(engine)
        publisher.has(3)
        await until(lambda: rig.run("one") == 3)
        rig.followed.tick(5.0)
        await publisher.stop()
        connected = rig.connection_of("one")
        await until(lambda: not connected())
        rig.followed.tick(6.0)
        rig.followed.tick(15.9)
        assert rig.run("one") == 3
        rig.followed.tick(16.0)
        assert rig.run("one") == 0
        publisher.start()
        publisher.has(3)
        await until(lambda: rig.run("one") == 3 and rig.is_exact("one"))


async def test_restart_that_the_health_check_sees_counts_at_once(tmp_path: Path) -> None:
    """Before the stream has noticed it; what the engine still has comes again."""
    async with rig_in(tmp_path) as rig:
        engine = rig.engine("one")
        publisher = rig.publisher(engine)
        rig.followed.add(engine)
        publisher.has(3)
        await until(lambda: rig.run("one") == 3)
        rig.followed.restarted("one")
        assert rig.run("one") == 0
        assert not rig.is_exact("one")
        await until(lambda: rig.run("one") == 3 and rig.is_exact("one"))


async def test_stores_of_all_hosts_are_followed(tmp_path: Path) -> None:
    """Ours and remote ones, with their load reports. An engine is known exactly while its host's
    store is."""
    remote = {"id": "far", "events": f"ipc://{tmp_path}/f", "events_replay": f"ipc://{tmp_path}/fr"}
    async with rig_in(tmp_path, store={"id": "near"}, remote_stores=[remote]) as rig:
        ours = rig.publisher_at(
            rig.paths.store_events(rig.config), rig.paths.store_replay(rig.config)
        )
        theirs = rig.publisher_at(remote["events"], remote["events_replay"])
        at_home, away = rig.engine("at-home"), rig.engine("away", store="far")
        for engine in (at_home, away):
            rig.publisher(engine)
            rig.followed.add(engine)
        ours.has(2)
        theirs.has(4)
        await until(lambda: rig.run("near", Medium.MEMORY) == 2)
        await until(lambda: rig.run("far", Medium.MEMORY) == 4)
        theirs.publisher.publish_loaded(BlocksLoaded("r", 4, 4, 100, 0.1))
        await until(lambda: len(rig.loads) == 1)
        await until(lambda: rig.is_exact("at-home") and rig.is_exact("away"))
        await theirs.stop()
        await until(lambda: not rig.is_exact("away"))
        assert rig.is_exact("at-home")
        assert rig.followed.store is rig.followed.stores["near"]


async def test_reports_of_reuse_teach_what_was_missed(tmp_path: Path) -> None:
    """Blocks of which nothing else would tell: what they taught is counted."""
    async with rig_in(tmp_path) as rig:
        engine = rig.engine("one")
        publisher = rig.publisher(engine)
        rig.followed.add(engine)
        assert rig.followed.learned("one") == 0
        publisher.has(3, session_id=REPORT_SESSION)
        await until(lambda: rig.run("one") == 3)
        assert rig.followed.learned("one") == 3


async def test_more_than_an_engine_has_room_for_is_asked_anew(tmp_path: Path) -> None:
    """Afterwards it is believed again."""
    async with rig_in(tmp_path) as rig:
        engine = rig.engine("one")
        publisher = rig.publisher(engine)
        rig.followed.add(engine)
        rig.followed.has_room("one", 3)
        rig.followed.has_room("unknown", 3)
        subscriber = rig.followed.engines["one"].subscriber
        await until(lambda: rig.is_exact("one"))
        publisher.has(2)
        await until(lambda: rig.run("one") == 2)
        resyncs = subscriber.state().resyncs
        publisher.has(2, session_id="of another client")
        await until(lambda: subscriber.state().resyncs == resyncs + 1)
        await until(lambda: rig.is_exact("one") and rig.run("one") == 2)
        publisher.has(2, session_id="of another client")
        batches = subscriber.state().batches
        await until(lambda: subscriber.state().batches > batches)
        assert rig.is_exact("one")
        assert subscriber.state().resyncs == resyncs + 1


@pytest.mark.parametrize("known", [True, False])
async def test_adapters_are_looked_up_per_engine(tmp_path: Path, known: bool) -> None:
    """One name may mean different weights on different engines."""
    root = routing_root("m", "") if known else None
    config = HeadstartConfig.model_validate(
        {"model": {"name": "m"}, "store": None, "runtime_dir": str(tmp_path)}
    )
    residency = Residency(MIB)
    asked: list[tuple[str, str, str | None]] = []

    def root_of(engine_id: str) -> Callable[[str, str | None], BlockHash | None]:
        def find(salt: str, name: str | None) -> BlockHash | None:
            asked.append((engine_id, salt, name))
            return root

        return find

    followed = FollowedEvents(
        config,
        RuntimePaths.of(config),
        block_size=BLOCK,
        residency=residency,
        loads=LoadReports(),
        root_of=root_of,
    )
    engine = EngineConfig.model_validate({"id": "one", "block_size": BLOCK})
    paths = RuntimePaths.of(config)
    publisher = Publisher(paths.engine_events(engine), paths.engine_replay(engine))
    publisher.start()
    try:
        async with followed:
            followed.add(engine)
            publisher.has(2, lora_name="l")
            await until(lambda: residency.stats().nodes == 2)
            assert asked[0] == ("one", "", "l")
            expected = {Holder("one", Medium.DEVICE): 2} if known else {}
            assert residency.match(chain(2)).by_holder == expected
    finally:
        await publisher.stop()


@pytest.mark.parametrize("binds", ["engine", "gateway"])
async def test_who_binds_may_be_said(tmp_path: Path, binds: str) -> None:
    """An engine on another host publishes on all its addresses; vLLM's rule for ours would be that
    it connects."""
    with socket.socket() as one, socket.socket() as two:
        one.bind(("127.0.0.1", 0))
        two.bind(("127.0.0.1", 0))
        port, replay_port = one.getsockname()[1], two.getsockname()[1]
    endpoint, replay = f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{replay_port}"
    async with rig_in(tmp_path) as rig:
        engine = rig.engine("e", events=endpoint, events_replay=replay, events_bind=binds)
        if binds == "engine":
            publisher = rig.publisher_at(f"tcp://*:{port}", f"tcp://*:{replay_port}")
            rig.followed.add(engine)
            await until(rig.connection_of("e"))
            publisher.has(3)
            await until(lambda: rig.run("e") == 3)
        else:
            rig.followed.add(engine)
            with zmq.Context() as context, context.socket(zmq.PUB) as pub:
                pub.connect(endpoint)
                await until(rig.connection_of("e"))
                pub.close(linger=0)

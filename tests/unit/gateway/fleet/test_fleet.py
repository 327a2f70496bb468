"""Replicas are opened, changed and dropped as they are wanted. Nobody listens where they are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from gateway.fleet.errors import ReplicaExistsError, UnknownReplicaError
from gateway.fleet.fleet import Fleet
from gateway.fleet.ticket import Ticket
from gateway.settings.user_error import UserError
from policies.config import HeadstartConfig
from policies.engine import EngineConfig


class Others:
    """Names, events and accounts: they keep what they were told."""

    def __init__(self) -> None:
        self.there: list[str] = []
        self.told: list[str] = []
        self.refused: str | None = None

    async def add_replica(self, engine: EngineConfig) -> None:
        await asyncio.sleep(0)
        if engine.id == self.refused:
            raise UserError("its names contradict others'")

    def remove_replica(self, engine_id: str) -> None:
        self.told.append(f"names without {engine_id}")

    def serves(self, engine_id: str, name: str) -> bool:
        return name == "m"

    def add(self, engine: EngineConfig) -> None:
        self.there.append(engine.id)

    async def remove(self, engine_id: str) -> None:
        self.there.remove(engine_id)

    def restarted(self, engine_id: str) -> None:
        self.told.append(f"{engine_id} restarted")

    def has_room(self, engine_id: str, num_blocks: int) -> None:
        self.told.append(f"{engine_id} has room for {num_blocks}")

    def tick(self, now: float) -> None:
        pass


class Accounts:
    def __init__(self) -> None:
        self.there: list[str] = []

    def add_replica(self, replica: str) -> None:
        self.there.append(replica)

    def remove_replica(self, replica: str) -> None:
        self.there.remove(replica)


@asynccontextmanager
async def open_fleet(**fleet: object) -> AsyncIterator[tuple[Fleet, Others, Accounts]]:
    config = HeadstartConfig.model_validate({"store": None, "fleet": fleet})
    others, accounts = Others(), Accounts()
    opened = Fleet(config, others, others, accounts)
    try:
        yield opened, others, accounts
    finally:
        await opened.close()
    assert others.there == accounts.there == []


def engine(name: str, port: int = 9) -> EngineConfig:
    return EngineConfig(id=name, url=f"http://127.0.0.1:{port}")


def ids(fleet: Fleet) -> list[str]:
    return [replica.id for replica in fleet.replicas]


async def gone(fleet: Fleet, name: str) -> None:
    async with asyncio.timeout(10):
        while name in ids(fleet):  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.01)


async def test_everybody_hears_of_a_replica() -> None:
    """When it comes, and when it goes."""
    async with open_fleet() as (fleet, others, accounts):
        await fleet.add(engine("a"))
        assert ids(fleet) == others.there == accounts.there == ["a"]
        assert [each.id for each in fleet.serving("m")] == ["a"]
        assert fleet.serving("another") == []
        await fleet.remove("a", force=True)
        assert ids(fleet) == others.there == accounts.there == []


async def test_an_id_stands_for_one_replica() -> None:
    """Also when two are added at the same moment."""
    async with open_fleet() as (fleet, others, _):
        results = await asyncio.gather(
            fleet.add(engine("a")), fleet.add(engine("a")), return_exceptions=True
        )
        assert sorted(type(result).__name__ for result in results) == [
            "NoneType",
            "ReplicaExistsError",
        ]
        with pytest.raises(ReplicaExistsError):
            await fleet.add(engine("a"))
        assert others.there == ["a"]


async def test_a_fleet_is_bounded() -> None:
    """The error names the key."""
    async with open_fleet(max_replicas=1) as (fleet, _, _):
        await fleet.add(engine("a"))
        with pytest.raises(UserError, match=r"fleet\.max_replicas"):
            await fleet.add(engine("b"))


async def test_unknown_replicas_are_said_to_be() -> None:
    """By each of the ways to change one."""
    async with open_fleet() as (fleet, _, _):
        with pytest.raises(UnknownReplicaError):
            fleet.drain("x")
        with pytest.raises(UnknownReplicaError):
            fleet.undrain("x")
        with pytest.raises(UnknownReplicaError):
            await fleet.remove("x")


async def test_a_removed_replica_stays_until_its_answers_have_ended() -> None:
    """It gets no new ones meanwhile."""
    async with open_fleet() as (fleet, _, _):
        await fleet.add(engine("a"))
        (replica,) = fleet.replicas
        await replica.places.enter(Ticket("default"))
        await fleet.remove("a")
        assert not replica.condition.accepts
        await asyncio.sleep(0.3)
        assert ids(fleet) == ["a"]
        replica.places.leave()
        await gone(fleet, "a")


async def test_a_removal_can_be_taken_back() -> None:
    """While answers are still running."""
    async with open_fleet() as (fleet, _, _):
        await fleet.add(engine("a"))
        (replica,) = fleet.replicas
        await replica.places.enter(Ticket("default"))
        await fleet.remove("a")
        fleet.undrain("a")
        replica.places.leave()
        await asyncio.sleep(0.6)
        assert ids(fleet) == ["a"]


async def test_the_fleet_becomes_what_is_wanted() -> None:
    """New ones come, missing ones go, changed ones are opened again, and the rest is left alone."""
    async with open_fleet() as (fleet, others, _):
        await fleet.apply([engine("a"), engine("b"), engine("c")])
        kept = {replica.id: replica for replica in fleet.replicas}
        await kept["b"].places.enter(Ticket("default"))
        await fleet.apply([engine("a"), engine("b", port=10), engine("d")])
        await gone(fleet, "c")
        assert kept["b"] in fleet.replicas  # until its answer has ended
        kept["b"].places.leave()
        async with asyncio.timeout(10):
            while kept["b"] in fleet.replicas or "b" not in ids(fleet):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        now = {replica.id: replica for replica in fleet.replicas}
        assert sorted(now) == ["a", "b", "d"]
        assert now["a"] is kept["a"]
        assert now["b"] is not kept["b"]
        assert sorted(others.there) == ["a", "b", "d"]


async def test_lists_leave_alone_what_was_added_by_hand() -> None:
    """Until they name it themselves."""
    async with open_fleet() as (fleet, _, _):
        await fleet.add(engine("by-hand"))
        await fleet.apply([engine("a")])
        await fleet.apply([])
        await gone(fleet, "a")
        assert ids(fleet) == ["by-hand"]
        await fleet.apply([engine("by-hand")])
        await fleet.apply([])
        await gone(fleet, "by-hand")


async def test_what_cannot_be_taken_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """One wrong entry of a list does not keep out the others."""
    async with open_fleet() as (fleet, others, _):
        others.refused = "b"
        await fleet.apply([engine("a"), engine("b"), engine("c")])
        assert ids(fleet) == ["a", "c"]
    assert "replica b is left out: its names contradict others'" in caplog.text


async def test_a_replica_that_went_comes_back_before_it_is_gone() -> None:
    """A name that flaps in a list: the replica is used again, with all that is known of it."""
    async with open_fleet() as (fleet, _, _):
        await fleet.apply([engine("a"), engine("b")])
        kept = {replica.id: replica for replica in fleet.replicas}
        await kept["a"].places.enter(Ticket("default"))
        await fleet.apply([engine("b")])
        await fleet.apply([engine("a"), engine("b")])
        kept["a"].places.leave()
        await asyncio.sleep(0.6)
        assert {replica.id: replica for replica in fleet.replicas} == kept
        assert kept["a"].condition.state.value != "draining"


async def test_an_ejected_replica_lets_its_requests_go() -> None:
    """Those without a byte, and those that wait for a place."""
    async with open_fleet() as (fleet, _, _):
        await fleet.add(engine("a"))
        (replica,) = fleet.replicas
        replica.condition.request_ok()

        async def waits() -> str:
            async with replica.losses.lifeline():
                await asyncio.sleep(3600)
            return "never"

        waiting = asyncio.ensure_future(waits())
        await asyncio.sleep(0)
        replica.condition.probe_failed("gone", refused=True)
        with pytest.raises(Exception, match="gone"):
            await waiting

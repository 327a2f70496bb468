"""From a prompt to a place: who is asked, who waits, and for whom."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
from replicas import replica_of

from engine_adapter.base import Prompt
from gateway.fleet.assignment import Asked
from gateway.fleet.dispatch import Dispatcher
from gateway.fleet.replica import Replica
from gateway.fleet.ticket import Ticket
from gateway.web.errors import TooManyRequestsError, UnavailableError
from policies.engine import EngineConfig
from policies.fleet import CoalescingConfig
from policies.routing import LeastTtftRouting, RoundRobinRouting, Routing
from policies.routing.base import Candidate, Decision, Evidence, RouteRequest, Score
from prefix_store.base import BlockHash
from prefix_store.hashing import as_token_ids, digest, extend_chain
from prefix_store.residency import Residency

BLOCK_SIZE = 16
ROOT = digest("root")


class Rig:
    """A dispatcher over replicas that serve everything; counts what was said to be answered."""

    def __init__(
        self,
        *replicas: Replica,
        coalescing: CoalescingConfig | None = None,
        routing: Routing | Stubborn | None = None,
    ) -> None:
        self.replicas = replicas
        self.residency = Residency(16 * 1024**2)
        self.answers: list[str] = []
        self.known = Evidence.EXACT
        self.dispatcher = Dispatcher(
            self,
            (routing or LeastTtftRouting()).router(),
            self.residency,
            self,
            coalescing=coalescing or CoalescingConfig(),
        )
        for replica in replicas:
            replica.condition.probe_ok()

    def serving(self, model: str) -> Sequence[Replica]:
        return self.replicas if model == "m" else ()

    def evidence(self, engine_id: str) -> Evidence:
        return self.known

    def answered(self, engine_id: str, hashes: Sequence[BlockHash], now: float) -> None:
        self.answers.append(engine_id)

    def hold(self, replica: Replica, asked: Asked, blocks: int) -> None:
        """The replica's own cache has the first blocks of a prompt."""
        self.residency.store(replica.device, None, asked.hashes[:blocks])


class Stubborn:
    """Always the first one."""

    def router(self) -> Stubborn:
        return self

    def decide(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Decision:
        ranking = tuple(Score(each, float(i)) for i, each in enumerate(candidates))
        return Decision("stubborn", ranking, "the first")


def replicas(count: int, **fields: int) -> list[Replica]:
    return [replica_of(EngineConfig(id=f"r{i}", **fields)) for i in range(count)]  # type: ignore[arg-type]


_serial = iter(range(10**6))


def asked(num_tokens: int = 1024, *, words: int = 0, model: str = "m") -> Asked:
    """A prompt; equal `words`, equal prompt."""
    tokens = as_token_ids(np.arange(num_tokens) + 10_000 * words)
    prompt = Prompt(num_tokens, extend_chain(ROOT, tokens, BLOCK_SIZE), [tokens])
    key = f"request {next(_serial)}"
    route = RouteRequest(num_tokens=num_tokens, session="", prefix=prompt.block_hashes[0])
    return Asked(key, key, model, BLOCK_SIZE, prompt, route, Ticket("default"))


async def enters(rig: Rig, request: Asked) -> str:
    """The replica that gets it, at once."""
    async with rig.dispatcher.place(request) as assignment:
        rig.dispatcher.first_token(request, assignment)
        return assignment.replica.id


async def test_the_replica_that_holds_the_prefix_gets_the_request() -> None:
    """And the assignment says how much of it is there; the last token is always computed."""
    first, second = replicas(2)
    rig, request = Rig(first, second), asked()
    rig.hold(second, request, 64)
    async with rig.dispatcher.place(request) as assignment:
        assert assignment.replica is second
        assert (assignment.captured_blocks, assignment.device_blocks) == (64, 64)
        line = assignment.made.line()
    assert line.evidence == "exact"
    assert line.candidates[0].device_tokens == 1024 - BLOCK_SIZE
    assert second.places.running == 0


async def test_a_prompt_that_is_not_known_is_placed_all_the_same() -> None:
    """The decision says that it rests on nothing."""
    rig = Rig(*replicas(2))
    request = asked()
    request.prompt = None
    async with rig.dispatcher.place(request) as assignment:
        assert assignment.made.evidence is Evidence.FALLBACK
    assert rig.dispatcher.decisions.by_evidence == {"fallback": 1}


async def test_what_is_only_guessed_is_said_to_be() -> None:
    """As its events are behind, for example."""
    rig = Rig(*replicas(1))
    rig.known = Evidence.APPROXIMATE
    async with rig.dispatcher.place(asked()) as assignment:
        assert assignment.made.line().evidence == "approximate"


async def test_a_full_replica_is_passed_over() -> None:
    """The next best gets the request; when all are full it is refused."""
    first, second = replicas(2, max_running=1, max_waiting=0)
    rig, request = Rig(first, second), asked()
    rig.hold(first, request, 64)
    async with rig.dispatcher.place(request) as one, rig.dispatcher.place(asked()) as two:
        assert (one.replica, two.replica) == (first, second)
        with pytest.raises(TooManyRequestsError):
            await rig.dispatcher.enter(asked())
    assert await enters(rig, asked()) == "r0"
    assert [each.estimate.running + each.estimate.waiting for each in (first, second)] != [0, 3]


async def test_who_waits_at_a_replica_that_is_lost_goes_elsewhere() -> None:
    """No request fails for having waited in the wrong place."""
    first, second = replicas(2, max_running=1)
    rig, request = Rig(first, second, routing=Stubborn()), asked()
    async with rig.dispatcher.place(request):
        waiting = asyncio.ensure_future(enters(rig, asked(words=1)))
        await asyncio.sleep(0)
        assert first.places.waiting == 1
        first.condition.probe_failed("gone", refused=True)
        first.places.evict_waiting()
        assert await waiting == "r1"


async def test_a_replica_that_failed_a_request_is_not_asked_again() -> None:
    """The retry is counted by what went wrong."""
    first, second = replicas(2)
    rig, request = Rig(first, second), asked()
    rig.hold(first, request, 64)
    async with rig.dispatcher.place(request) as assignment:
        assert rig.dispatcher.has_others(request, assignment)
        rig.dispatcher.failed(request, assignment, "EngineLostError")
    assert first.estimate.waiting == 0
    async with rig.dispatcher.place(request) as assignment:
        assert assignment.replica is second
        assert assignment.made.attempt == 2
        assert not rig.dispatcher.has_others(request, assignment)
    assert rig.dispatcher.decisions.retries == {"EngineLostError": 1}


async def test_without_a_replica_that_can_answer_the_reasons_are_given() -> None:
    """A 503 that says what is wrong with each."""
    (only,) = replicas(1)
    rig = Rig(only)
    only.condition.drain()
    with pytest.raises(UnavailableError, match="r0: gets no new requests") as caught:
        await rig.dispatcher.enter(asked())
    assert caught.value.retry_after_s == 1
    with pytest.raises(UnavailableError, match="there is none"):
        await rig.dispatcher.enter(asked(model="another"))


async def test_the_only_replica_is_tried_when_nothing_listened_there() -> None:
    """It may just be back, and a refused connection costs nothing; one that hangs is left alone."""
    (only,) = replicas(1)
    rig = Rig(only)
    only.condition.probe_failed("nothing listens", refused=True)
    assert not only.condition.accepts
    assert await enters(rig, asked()) == "r0"
    only.condition.probe_failed("no answer within 3 s")
    with pytest.raises(UnavailableError):
        await rig.dispatcher.enter(asked())


async def test_equal_cold_prompts_are_computed_once() -> None:
    """The others wait for the first one's first token, and are sent where it is then."""
    rig = Rig(*replicas(4))
    leader = asked(words=1)
    async with rig.dispatcher.place(leader) as assignment:
        followers = [asyncio.ensure_future(enters(rig, asked(words=1))) for _ in range(3)]
        other = await enters(rig, asked(words=2))
        assert other != assignment.replica.id
        await asyncio.sleep(0.01)
        assert not any(each.done() for each in followers)
        rig.dispatcher.first_token(leader, assignment)
        assert await asyncio.gather(*followers) == [assignment.replica.id] * 3
    assert rig.dispatcher.decisions.joined == 3


async def test_a_leader_that_fails_makes_way_for_another() -> None:
    """One of those who waited computes the prompt, and the rest wait for that one."""
    rig = Rig(*replicas(2))
    async with rig.dispatcher.place(asked(words=1)):
        followers = [asyncio.ensure_future(enters(rig, asked(words=1))) for _ in range(3)]
        await asyncio.sleep(0.01)
        assert not any(each.done() for each in followers)
    async with asyncio.timeout(5):
        assert len(set(await asyncio.gather(*followers))) <= 2


async def test_nobody_waits_longer_than_configured() -> None:
    """Then they go to the same replica, where the engine may still share the work."""
    rig = Rig(*replicas(2), coalescing=CoalescingConfig(max_wait=0.02))
    async with rig.dispatcher.place(asked(words=1)) as assignment:
        assert await enters(rig, asked(words=1)) == assignment.replica.id


@pytest.mark.parametrize("coalescing", [{"max_wait": 0}, {"min_tokens": 2048}])
async def test_coalescing_can_be_off_or_too_short_to_matter(coalescing: dict[str, int]) -> None:
    """Then nobody waits."""
    rig = Rig(*replicas(2), coalescing=CoalescingConfig(**coalescing))
    async with rig.dispatcher.place(asked(words=1)):
        async with asyncio.timeout(5):
            await enters(rig, asked(words=1))
    assert rig.dispatcher.decisions.joined == 0


async def test_policies_that_do_not_look_at_prefixes_make_nobody_wait() -> None:
    """A request only waits where it would have been sent anyway."""
    rig = Rig(*replicas(2), routing=RoundRobinRouting())
    async with rig.dispatcher.place(asked(words=1)) as one:
        async with asyncio.timeout(5):
            assert await enters(rig, asked(words=1)) != one.replica.id


async def test_a_cancelled_request_leaves_nothing_behind() -> None:
    """While it waits for a place, and while it waits for a prefix."""
    (only,) = replicas(1, max_running=1)
    rig = Rig(only)
    async with rig.dispatcher.place(asked(words=1)):
        tasks = [
            asyncio.ensure_future(enters(rig, asked(words=1))),
            asyncio.ensure_future(enters(rig, asked(words=2))),
        ]
        await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert only.places.waiting == 0
    assert await enters(rig, asked(words=3)) == "r0"
    assert only.places.running == 0

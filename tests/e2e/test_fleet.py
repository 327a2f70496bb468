"""Several replicas behind gateways, on simulated engines: where requests go, and what happens when
replicas come, go and fail. tests/engine/test_fleet.py does the like on vLLM."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from live_stack import free_ports
from simulated_fleet import BLOCK_SIZE, MODEL, open_fleet

QUICK = {"health": {"interval": 0.05, "timeout": 0.5, "failures": 2, "ejection": 0.05}}


@pytest.fixture
def root() -> Iterator[Path]:
    """For sockets, whose paths must be short."""
    with tempfile.TemporaryDirectory(prefix="hs-") as path:
        yield Path(path)


def prompt(seed: int, num_tokens: int = 640) -> list[int]:
    chooser = random.Random(seed)
    return [chooser.randrange(300, 30_000) for _ in range(num_tokens)]


async def test_a_conversation_stays_where_its_prefix_is(root: Path) -> None:
    """Every turn goes to the replica that has the earlier ones, which is known exactly; what was
    predicted is what was reused."""
    async with open_fleet(root, 3, ports=free_ports(4)) as fleet:
        homes = set()
        for seed in range(3):
            first = await fleet.ask(prompt(seed))
            again = await fleet.ask(prompt(seed) + prompt(seed + 100, 64))
            assert again.replica == first.replica
            assert again.evidence == "exact"
            assert again.cached_tokens == again.device_tokens(str(again.replica)) == 640
            homes.add(first.replica)
        assert len(homes) > 1
        stats = await fleet.stats()
        assert stats.routing is not None
        assert stats.routing.by_evidence == {"exact": 6}
        assert stats.total.windows.since_start.prompt_tokens.unpredicted == 0


async def test_two_gateways_route_alike(root: Path) -> None:
    """Each builds its index from the same events: what went through one is known to the other."""
    async with open_fleet(root, 3, gateways=2, ports=free_ports(5)) as fleet:
        for seed in range(4):
            one, other = (0, 1) if seed % 2 else (1, 0)
            first = await fleet.ask(prompt(seed), gateway=one)
            again = await fleet.ask(prompt(seed), gateway=other)
            assert again.replica == first.replica
            assert again.cached_tokens == 640 - BLOCK_SIZE
            assert again.evidence == "exact"


async def test_a_gateway_that_joins_late_learns_what_is_there(root: Path) -> None:
    """From the replay of each replica's events."""
    async with open_fleet(root, 2, ports=free_ports(4)) as fleet:
        first = await fleet.ask(prompt(1))
        again = await fleet.ask(prompt(1), gateway=await fleet.add_gateway())
        assert again.replica == first.replica
        assert again.device_tokens(str(first.replica)) == 640 - BLOCK_SIZE


async def test_without_events_what_was_sent_is_remembered(root: Path) -> None:
    """And every decision says that it rests on that."""
    async with open_fleet(root, 3, ports=free_ports(4), engine={"report_events": False}) as fleet:
        first = await fleet.ask(prompt(1))
        again = await fleet.ask(prompt(1))
        assert again.replica == first.replica
        assert again.evidence == "approximate"
        assert again.cached_tokens == 640 - BLOCK_SIZE


async def test_a_replica_that_restarts_holds_nothing(root: Path) -> None:
    """Traffic goes on meanwhile, and nothing stale is believed afterwards."""
    async with open_fleet(root, 2, ports=free_ports(3), fleet=QUICK) as fleet:
        first = await fleet.ask(prompt(1))
        home = str(first.replica)
        await fleet.fault(int(home[1:]), "restart", seconds=0.5)
        answers = [await fleet.ask(prompt(seed)) for seed in range(20, 30)]
        assert {answer.status for answer in answers} == {200}
        await fleet.condition(home, "ready")
        await fleet.exact()
        again = await fleet.ask(prompt(1))
        assert again.status == 200
        assert again.device_tokens(home) == 0


async def test_what_others_have_an_engine_report_is_not_believed_for_ever(root: Path) -> None:
    """A client beside the gateway asks an engine to announce again what it reuses, which looks
    like copies of blocks. Once there are more than the engine has room for, all is told anew."""
    small = {"options": {"kv_tokens": 256 * BLOCK_SIZE, "max_model_len": 2048}}
    async with open_fleet(root, 1, ports=free_ports(2), fleet=QUICK, **small) as fleet:
        url = f"{fleet.engines[0].url}/v1/completions"
        report = {"vllm_xargs": {"kv_cache_report_mode": "full"}}
        body = {"model": MODEL, "prompt": prompt(1), "max_tokens": 1, **report}
        for _ in range(3):
            async with fleet.client.post(url, json=body) as response:
                assert response.status == 200
        for seed in range(20, 30):
            await fleet.ask(prompt(seed))
        await fleet.exact()
        events = (await fleet.stats()).replicas["r0"].state.events
        assert events is not None
        assert events.resyncs == 1
        assert events.blocks <= 256
        again = await fleet.ask(prompt(29))
        assert again.device_tokens("r0") == again.cached_tokens == 640 - BLOCK_SIZE


async def test_requests_that_had_not_begun_survive_their_replica(root: Path) -> None:
    """A replica dies under load: whoever had no byte yet is answered by another one."""
    slow = {"options": {"max_batched_tokens": 64}}
    async with open_fleet(root, 3, ports=free_ports(4), fleet=QUICK, **slow) as fleet:
        asking = [asyncio.ensure_future(fleet.ask(prompt(seed, 3000))) for seed in range(24)]
        await asyncio.sleep(0.1)
        await fleet.fault(0, "restart", seconds=1)
        answers = await asyncio.gather(*asking)
        assert {answer.status for answer in answers} == {200}
        assert any(answer.route["attempt"] > 1 for answer in answers if answer.route)
        stats = await fleet.stats()
        assert stats.routing is not None
        assert sum(stats.routing.retries.values()) >= 1


async def test_a_replica_that_hangs_is_left(root: Path) -> None:
    """It accepts connections and says nothing: its requests go elsewhere when it is ejected, and it
    gets new ones when it is back."""
    async with open_fleet(root, 2, ports=free_ports(3), fleet=QUICK) as fleet:
        home = str((await fleet.ask(prompt(1))).replica)
        other = {"r0": "r1", "r1": "r0"}[home]
        await fleet.fault(int(home[1:]), "hang")
        moved = await asyncio.wait_for(fleet.ask(prompt(1)), 20)
        assert (moved.status, moved.replica) == (200, other)
        await fleet.condition(home, "ejected")


async def test_a_drained_replica_gets_no_new_requests(root: Path) -> None:
    """Running answers end there; undrained, it is used again."""
    async with open_fleet(root, 2, ports=free_ports(3)) as fleet:
        home = str((await fleet.ask(prompt(1))).replica)
        await fleet.admin("POST", f"/{home}/drain")
        away = [await fleet.ask(prompt(1)) for _ in range(3)]
        assert home not in {answer.replica for answer in away}
        await fleet.admin("POST", f"/{home}/undrain")
        assert home in {(await fleet.ask(prompt(seed))).replica for seed in range(50, 60)}


async def test_replicas_come_and_go_at_run_time(root: Path) -> None:
    """Removed ones are forgotten; one that is added under an old name begins anew."""
    async with open_fleet(root, 2, ports=free_ports(3)) as fleet:
        home = str((await fleet.ask(prompt(1))).replica)
        listed = {each["id"]: each for each in (await fleet.admin("GET", ""))["replicas"]}
        await fleet.admin("DELETE", f"/{home}")
        await fleet.gone(home)
        assert (await fleet.ask(prompt(1))).replica != home
        index = int(home[1:])
        engine = {
            "id": home,
            "url": listed[home]["url"],
            "block_size": BLOCK_SIZE,
            "events": f"ipc://{root}/e{index}",
            "events_replay": f"ipc://{root}/p{index}",
        }
        await fleet.admin("POST", "", json=engine)
        await fleet.condition(home, "ready")
        await fleet.exact()
        again = await fleet.ask(prompt(1))
        assert again.device_tokens(home) == 640 - BLOCK_SIZE


async def test_equal_cold_prompts_that_arrive_together_prefill_once(root: Path) -> None:
    """A burst of one new prompt: one computes it, the others reuse it on the same replica."""
    async with open_fleet(root, 4, ports=free_ports(5)) as fleet:
        burst = [fleet.ask([*prompt(7, 2000), i]) for i in range(12)]
        answers = await asyncio.gather(*burst)
        computed = [a for a in answers if a.cached_tokens == 0]
        assert len(computed) == 1
        assert all(a.cached_tokens == 2000 for a in answers if a is not computed[0])
        assert len({a.replica for a in answers}) == 1


async def test_a_hot_prefix_spreads_when_its_replica_is_saturated(root: Path) -> None:
    """Many requests with one prefix and much to compute each: others help."""
    slow = {"options": {"max_batched_tokens": 256}}
    async with open_fleet(root, 3, ports=free_ports(4), **slow) as fleet:
        shared = prompt(1, 320)
        await fleet.ask(shared)
        burst = [fleet.ask(shared + prompt(100 + i, 3000)) for i in range(24)]
        answers = await asyncio.gather(*burst)
        assert len({a.replica for a in answers}) == 3


async def test_a_deadline_that_passes_in_the_queue_is_said(root: Path) -> None:
    """The client gets 504, and nothing is computed for it."""
    narrow = {"engine": {"max_running": 1}, "options": {"max_batched_tokens": 64}}
    async with open_fleet(root, 1, ports=free_ports(2), **narrow) as fleet:
        running = asyncio.ensure_future(fleet.ask(prompt(1, 8000)))
        await asyncio.sleep(0.05)
        late = await fleet.ask(prompt(2), headers={"x-headstart-deadline-ms": "30"})
        assert late.status == 504
        assert late.body["error"]["code"] == "deadline_exceeded"
        assert (await running).status == 200


async def test_clients_that_leave_leave_nothing_behind(root: Path) -> None:
    """1,000 of them, at random points: no place, no request in flight, none in an engine."""
    async with open_fleet(root, 2, ports=free_ports(3)) as fleet:
        chooser = random.Random(5)
        places = asyncio.Semaphore(64)

        async def leave(seed: int) -> None:
            async with places:
                body = {
                    "model": MODEL,
                    "prompt": prompt(seed, chooser.randrange(16, 600)),
                    "max_tokens": 32,
                    "stream": True,
                }
                url = f"{fleet.urls[0]}/v1/completions"
                try:
                    async with asyncio.timeout(chooser.random() * 0.25):
                        async with fleet.client.post(url, json=body) as response:
                            await response.read()
                except TimeoutError:
                    pass

        await asyncio.gather(*(leave(seed) for seed in range(1000)))
        async with asyncio.timeout(20):
            while True:
                stats = await fleet.stats()
                states = [each.state for each in stats.replicas.values()]
                left = stats.in_flight + stats.waiting
                left += sum((s.in_flight or 0) + (s.waiting or 0) for s in states)
                left += sum((s.engine_running or 0) + (s.engine_waiting or 0) for s in states)
                if not left:
                    break
                await asyncio.sleep(0.05)
        assert stats.total.windows.since_start.requests.cancelled > 100

"""Two real vLLM replicas behind a gateway: exact routing, and what happens when one is killed,
hangs, is drained, or its events are cut off. Every test leaves both replicas ready."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from live_fleet import REPLICAS, LiveFleet, Routed, Traffic, until

pytestmark = pytest.mark.engine

BLOCK = 32

NewPrompt = Callable[[int], list[int]]


@pytest.fixture(scope="module")
def fleet(model_dir: Path) -> Iterator[LiveFleet]:
    fleet = LiveFleet(model_dir)
    try:
        fleet.start()
        yield fleet
    finally:
        fleet.close()


def other(replica: str | None) -> str:
    assert replica is not None
    return REPLICAS[1 - REPLICAS.index(replica)]


def test_requests_go_where_their_prefix_is(fleet: LiveFleet, new_prompt: NewPrompt) -> None:
    """What the index knows of a replica is exactly what its engine then reuses."""
    prompts = [new_prompt(10 * BLOCK) for _ in range(4)]
    with ThreadPoolExecutor(len(prompts)) as clients:  # at once: one replica would be busy
        homes = [asked.replica for asked in clients.map(fleet.ask, prompts)]
    assert set(homes) == set(REPLICAS)
    for prompt, home in zip(prompts, homes, strict=True):
        again = fleet.ask(prompt + new_prompt(BLOCK))
        assert again.replica == home
        assert again.evidence == "exact"
        assert again.cached_tokens == again.known[str(home)] == 10 * BLOCK
        assert again.known[other(home)] == 0


def test_an_engine_that_is_killed_in_traffic(fleet: LiveFleet, new_prompt: NewPrompt) -> None:
    """No request fails whose answer had not begun; and when it is back, nothing that its
    predecessor held is believed to be there."""
    prompt = new_prompt(6 * BLOCK)
    home = str(fleet.ask(prompt).replica)

    def ask() -> Routed:
        return fleet.ask(new_prompt(2 * BLOCK))

    with Traffic(ask, clients=4, pause_s=0.1) as dense:
        until(lambda: len(dense.seen) >= 8)
        fleet.kill(home)
        killed_at = len(dense.seen)
        until(lambda: len(dense.seen) >= killed_at + 12)
    with Traffic(ask, clients=1, pause_s=1.0) as light:  # an engine has to start beside it
        fleet.launch(home)
        fleet.await_engine(home)
        fleet.await_state(home, condition="ready", evidence="exact")
        back_at = len(light.seen)
        until(lambda: len(light.seen) >= back_at + 2)
    assert {each.status for each in dense.seen + light.seen} == {200}
    assert {each.replica for each in dense.seen[killed_at + 8 :]} == {other(home)}
    again = fleet.ask(prompt)
    assert again.known[home] == 0


def test_events_that_are_cut_off_and_come_back(fleet: LiveFleet, new_prompt: NewPrompt) -> None:
    """Meanwhile the decisions say that they are approximate; afterwards the index knows what was
    computed in the dark."""
    before = new_prompt(6 * BLOCK)
    home = str(fleet.ask(before).replica)
    for relay in fleet.relays[home]:
        relay.cut()
    fleet.await_state(home, evidence="approximate")
    dark = [new_prompt(6 * BLOCK) for _ in range(4)]
    homes = [fleet.ask(prompt).replica for prompt in dark]
    assert fleet.ask(before).replica == home
    for relay in fleet.relays[home]:
        relay.restore()
    fleet.await_state(home, evidence="exact")
    for prompt, where in zip(dark, homes, strict=True):
        again = fleet.ask(prompt)
        assert again.replica == where
        assert again.cached_tokens == again.known[str(where)] == 5 * BLOCK


def test_a_replica_that_hangs(fleet: LiveFleet, new_prompt: NewPrompt) -> None:
    """Its requests are answered by the other one once it is ejected; it comes back by itself."""
    prompt = new_prompt(6 * BLOCK)
    home = str(fleet.ask(prompt).replica)
    fleet.signal(home, signal.SIGSTOP)
    try:
        moved = fleet.ask(prompt)
        assert (moved.status, moved.replica) == (200, other(home))
        fleet.await_state(home, condition="ejected")
    finally:
        fleet.signal(home, signal.SIGCONT)
    fleet.await_state(home, condition="ready", evidence="exact")
    assert fleet.ask(prompt).status == 200


def test_a_drained_replica(fleet: LiveFleet, new_prompt: NewPrompt) -> None:
    """It gets nothing new, whatever it holds, until it is used again."""
    prompt = new_prompt(6 * BLOCK)
    home = str(fleet.ask(prompt).replica)
    fleet.admin("POST", f"/{home}/drain")
    assert {fleet.ask(prompt).replica for _ in range(2)} == {other(home)}
    fleet.admin("POST", f"/{home}/undrain")
    fleet.await_state(home, condition="ready")
    assert fleet.ask(new_prompt(BLOCK)).status == 200

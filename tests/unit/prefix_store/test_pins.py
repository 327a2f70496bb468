"""Retention as an engine meets it: pins hold within their budget, end and are revoked; expired
blocks go first, then those of low priority."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import TypeAdapter
from store_engine import SHAPE, Engine, Prompt, prompts

from policies.access import Access, Retention
from policies.eviction import Eviction, FifoEviction, LruEviction
from policies.eviction.retained import Retained
from prefix_store import protocol
from prefix_store.base import BlockHash
from prefix_store.client import StoreClient
from prefix_store.index import RadixIndex
from prefix_store.pins import PinGroup, PinOwner, Pins, order_by

BLOCKS = 8
"""Of each prompt; memory holds eight prompts."""
PIN_CONTRACTS = {"match": {"prefix": "contract*"}, "pin": True, "ttl": "1h"}


@pytest.fixture
def start(start_store: Callable[..., Any]) -> Iterator[Callable[..., Engine]]:
    """Start a store of 4 MiB with retention rules."""
    clients: list[StoreClient] = []

    def begin(*rules: dict[str, Any], memory: dict[str, Any] | None = None, **keys: Any) -> Engine:
        store = start_store(
            memory={"capacity": "4MiB", **(memory or {})}, retention=list(rules), **keys
        )
        clients.append(StoreClient.connect(store.socket, timeout_s=5))
        return Engine(clients[-1])

    yield begin
    for client in clients:
        client.close()


def fill(engine: Engine, *, count: int = 20, seed: int = 100, **facts: str | int) -> None:
    """Serve prompts that nobody asks for again."""
    for number in range(count):
        engine.serve(Prompt(seed + number, BLOCKS), **facts)


def owners(pins: list[protocol.Pin]) -> dict[tuple[str, str, str, str], int]:
    return {(pin.tier, pin.tenant, pin.session, pin.prefix): pin.num_blocks for pin in pins}


def test_a_pinned_prompt_survives_what_evicts_the_others(start: Any) -> None:
    """160 blocks go through 64 places; the listing says whose pins there are and until when."""
    engine = start(PIN_CONTRACTS)
    pinned, other = prompts(2)
    engine.serve(pinned, tenant="acme", session="s", prefix="contract-1")
    engine.serve(other, tenant="acme", session="s", prefix="chat")
    fill(engine)
    (pin,) = engine.client.pins().pins
    assert (pin.tier, pin.tenant, pin.session, pin.prefix) == ("memory", "acme", "s", "contract-1")
    assert pin.num_blocks == BLOCKS
    assert pin.num_bytes == BLOCKS * SHAPE.num_bytes
    assert 3000 < pin.ends_in_s <= 3600
    assert engine.resident(other) == 0
    assert engine.resident(pinned) == BLOCKS


def test_pins_never_hold_more_than_their_budget(start: Any) -> None:
    """The first blocks of a prompt are worth most: they get it."""
    engine = start(PIN_CONTRACTS, memory={"pin_budget": "320KiB"})
    pinned = prompts(3)
    for prompt in pinned:
        engine.serve(prompt, prefix="contract")
    fill(engine)
    assert sum(pin.num_bytes for pin in engine.client.pins().pins) <= 320 * 1024
    assert [engine.resident(prompt) for prompt in pinned] == [5, 0, 0]


def test_without_a_budget_nothing_is_pinned(start: Any) -> None:
    """And the store works as if there were no rule."""
    engine = start(PIN_CONTRACTS, memory={"pin_budget": "0B"})
    (prompt,) = prompts(1)
    engine.serve(prompt, prefix="contract")
    assert engine.client.pins().pins == []
    fill(engine)
    assert engine.resident(prompt) == 0


def test_an_expired_pin_goes_first(start: Any) -> None:
    """It is listed no more, and its room is the next to be used."""
    engine = start({**PIN_CONTRACTS, "ttl": "150ms"})
    pinned, other = prompts(2)
    engine.serve(other)
    engine.serve(pinned, prefix="contract")
    fill(engine, count=6)
    time.sleep(0.2)
    assert engine.client.pins().pins == []
    fill(engine, count=1, seed=300)
    assert engine.resident(other) == BLOCKS
    assert engine.resident(pinned) == 0


@pytest.mark.parametrize("facts", [{"tenant": "a"}, {"session": "s"}, {"prefix": "contract-a"}])
def test_revoked_pins_go_like_others(start: Any, facts: dict[str, str]) -> None:
    """By tenant, by session or by prefix; what is not meant stays pinned."""
    engine = start(PIN_CONTRACTS)
    revoked, kept = prompts(2)
    engine.serve(revoked, tenant="a", session="s", prefix="contract-a")
    engine.serve(kept, tenant="b", session="t", prefix="contract-b")
    assert engine.client.unpin(**facts) == BLOCKS
    assert engine.client.unpin(**facts) == 0
    assert owners(engine.client.pins().pins) == {("memory", "b", "t", "contract-b"): BLOCKS}
    fill(engine)
    assert engine.resident(revoked) == 0
    assert engine.resident(kept) == BLOCKS


def test_a_pin_belongs_to_who_asked_for_it(start: Any) -> None:
    """Others who use the same blocks later neither own nor end it."""
    engine = start({"match": {"tenant": "acme"}, "pin": True, "ttl": "1h"})
    (prompt,) = prompts(1)
    engine.serve(prompt, tenant="acme", session="first")
    assert engine.serve(prompt, tenant="other", session="second") == BLOCKS
    assert owners(engine.client.pins().pins) == {("memory", "acme", "first", ""): BLOCKS}
    assert engine.client.unpin(tenant="other") == 0
    assert engine.client.unpin(tenant="acme") == BLOCKS


def test_pins_hold_in_every_tier(start: Any, tmp_path: Path) -> None:
    """And are revoked in all of them at once."""
    disk = {"path": str(tmp_path / "blocks"), "capacity": "4MiB", "write": "on_save"}
    engine = start(PIN_CONTRACTS, disk=disk)
    (pinned,) = prompts(1)
    engine.serve(pinned, prefix="contract")
    engine.await_stats(lambda stats: stats.tiers[0].blocks == BLOCKS)
    assert {pin.tier: pin.num_blocks for pin in engine.client.pins().pins} == {
        "memory": BLOCKS,
        "disk": BLOCKS,
    }
    for number in range(24):
        engine.serve(Prompt(500 + number, BLOCKS))
        least = BLOCKS * (number + 2)
        engine.await_stats(lambda stats, n=least: stats.tiers[0].blocks_stored >= n)
    assert engine.tier("disk").evictions["capacity"] > 0
    assert {pin.tier for pin in engine.client.pins().pins} == {"memory", "disk"}
    assert engine.client.unpin(prefix="contract") == 2 * BLOCKS
    assert engine.client.pins().pins == []


def test_low_priorities_go_first_and_high_ones_last(start: Any) -> None:
    """Within one priority the eviction decides: the least recently used."""
    engine = start(
        {"match": {"tenant": "batch"}, "priority": 10},
        {"match": {"tenant": "vip"}, "priority": 90},
    )
    all_prompts = prompts(8)
    high, plain, low = all_prompts[:2], all_prompts[2:4], all_prompts[4:]
    for tenant, group in (("vip", high), ("acme", plain), ("batch", low)):
        for prompt in group:
            engine.serve(prompt, tenant=tenant)
    fill(engine, count=3, tenant="acme")

    # Whoever asks is the last user and says the priority, so each asks in its own name.
    def there(tenant: str, group: list[Prompt]) -> list[int]:
        found = [engine.match(p.hashes, BLOCKS, request="", tenant=tenant) for p in group]
        return [matched.num_blocks for matched in found]

    assert there("batch", low) == [0, 0, 0, BLOCKS]
    assert there("acme", plain) == [BLOCKS] * 2
    assert there("vip", high) == [BLOCKS] * 2
    fill(engine, count=10, seed=300, tenant="acme")
    assert there("batch", low) == [0] * 4
    assert there("acme", plain) == [0] * 2
    assert there("vip", high) == [BLOCKS] * 2


def test_low_priority_finds_no_room_among_higher_ones(start: Any) -> None:
    """It would be the next to go itself."""
    engine = start({"match": {"tenant": "batch"}, "priority": 10})
    kept = prompts(8)
    for prompt in kept:
        engine.serve(prompt, tenant="acme")
    late = Prompt(900, BLOCKS)
    engine.serve(late, tenant="batch")
    assert engine.resident(late) == 0
    assert [engine.resident(prompt) for prompt in kept] == [BLOCKS] * 8


def test_after_their_ttl_blocks_are_the_first_to_go(start: Any) -> None:
    """Although they were used last; a use in time starts it again."""
    engine = start({"match": {"tenant": "short"}, "ttl": "300ms"})
    old, expired, renewed = prompts(3)
    engine.serve(old, tenant="acme")
    engine.serve(expired, tenant="short")
    engine.serve(renewed, tenant="short")
    fill(engine, count=5, tenant="acme")
    time.sleep(0.35)
    assert engine.serve(renewed, tenant="short") == BLOCKS
    fill(engine, count=1, seed=300, tenant="acme")
    assert engine.resident(renewed) == BLOCKS
    assert engine.resident(old) == BLOCKS
    assert engine.resident(expired) == 0


def test_clearing_takes_pinned_blocks_too(start: Any) -> None:
    """Pins hold against eviction, not against who empties the store."""
    engine = start(PIN_CONTRACTS)
    (pinned,) = prompts(1)
    engine.serve(pinned, tenant="acme", session="s", prefix="contract-1")
    assert engine.client.pins().pins
    assert engine.client.clear() == BLOCKS
    assert engine.client.pins().pins == []
    assert engine.client.stats().blocks == 0


def test_a_listing_is_cut_and_says_so(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of sessions may pin; filters find those that were left out."""
    monkeypatch.setattr(protocol, "MAX_PINS", 2)
    engine = start(
        {"match": {"tenant": "acme"}, "pin": True, "ttl": "1h"}, memory={"pin_budget": "4MiB"}
    )
    for number, prompt in enumerate(prompts(5)):
        engine.serve(prompt, tenant="acme", session=f"s{number}")
    listed = engine.client.pins()
    assert (len(listed.pins), listed.more) == (2, 3)
    last = engine.client.pins(session="s4")
    assert ([pin.session for pin in last.pins], last.more) == (["s4"], 0)


PINNED = Access(time_s=0.0, session="a", retention=Retention(ttl_s=100.0, pin=True))


KINDS = sorted(each.model_fields["kind"].default for each in get_args(get_args(Eviction)[0]))


def eviction_of(kind: str) -> Any:
    return TypeAdapter(Eviction).validate_python({"kind": kind})


def add_chain(index: RadixIndex[int], chain: int, count: int) -> None:
    parent = None
    for i in range(count):
        block = BlockHash(bytes([200, chain, i]) * 5)
        index.insert(
            parent,
            block,
            100 + 10 * chain + i,
            access=Access(time_s=0.1),
            num_tokens=8,
            num_bytes=10,
        )
        parent = block


def pinned_index(count: int) -> RadixIndex[int]:
    index: RadixIndex[int] = RadixIndex(Retained(LruEviction(), 10 * count))
    for number in range(count):
        index.insert(None, BlockHash(bytes([number]) * 16), number, access=PINNED, num_bytes=10)
    return index


def groups(index: RadixIndex[int]) -> list[PinGroup]:
    return Pins("memory", index).groups(1.0)


def test_another_eviction_keeps_the_pins_and_their_owners() -> None:
    """Also when somebody without a rule used the blocks since."""
    index = pinned_index(2)
    index.touch(list(index.nodes()), Access(time_s=0.5, session="b"))
    before = groups(index)
    assert before == [PinGroup("memory", PinOwner("", "a", ""), 2, 20, 100.0)]
    order_by(index, Retained(FifoEviction(), 20), 1.0)
    assert groups(index) == before
    assert index.evict(1.0) is None


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_takes_over_pins_and_blocks_from_every_other(kind: str) -> None:
    """Whatever ordered them before: pins stay, the rest goes, children before their parents."""
    index = pinned_index(2)
    for name in KINDS:
        add_chain(index, KINDS.index(name), 4)
        order_by(index, Retained(eviction_of(name), 20), 1.0)
    order_by(index, Retained(eviction_of(kind), 20), 1.0)
    gone = []
    while (node := index.evict(1.0)) is not None:
        gone.append(node.value)
    assert sorted(gone) == sorted(100 + 10 * c + i for c in range(len(KINDS)) for i in range(4))
    for chain in range(len(KINDS)):
        values = [value for value in gone if value // 10 == 10 + chain]
        assert values == sorted(values, reverse=True)
    assert [group.num_blocks for group in groups(index)] == [2]


def test_revoked_pins_stay_revoked_under_another_eviction() -> None:
    """The rule holds for the next request, not for what was revoked."""
    index = pinned_index(2)
    assert Pins("memory", index).revoke(PinOwner("", "a", ""), 1.0) == 2
    order_by(index, Retained(FifoEviction(), 20), 1.0)
    assert groups(index) == []
    assert index.evict(1.0) is not None


def test_a_smaller_budget_ends_pins_and_no_block() -> None:
    """As many as fit stay."""
    index = pinned_index(4)
    order_by(index, Retained(LruEviction(), 20), 1.0)
    assert [group.num_blocks for group in groups(index)] == [2]
    assert len(index) == 4
    assert sum(index.evict(1.0) is not None for _ in range(4)) == 2

"""The memory tier: visibility, leases, room, events."""

from __future__ import annotations

from collections.abc import Sequence

from policies.base import MIB
from policies.config import MemoryTierConfig
from prefix_store import events
from prefix_store.hashing import as_token_ids, extend_chain, routing_root
from prefix_store.memory_tier import ABANDONED_S, RESERVATION_S, MemoryTier
from prefix_store.record import RecordShape, payload, seal, write_header
from prefix_store.tier_counters import Removal

SHAPE = RecordShape(num_tokens=4, payload_bytes=896)
ROOT = routing_root("m", "s")


class Writer:
    """What an engine does with a tier."""

    def __init__(self, num_records: int) -> None:
        self.view = memoryview(bytearray(num_records * SHAPE.num_bytes))
        self.published: list[events.KVEvent] = []
        self.places: dict[int, int] = {}
        config = MemoryTierConfig(capacity=MIB)
        self.tier = MemoryTier(config, self.view, 30.0, self.published.extend)

    def write(self, tokens: Sequence[int], start: int = 0, now: float = 0.0) -> list[int]:
        """Reserve and write the blocks of a prompt from block `start` on; tickets to commit."""
        ids = as_token_ids(tokens)
        hashes = extend_chain(ROOT, ids, 4)
        parent = hashes[start - 1] if start else None
        places = self.tier.reserve(parent, hashes[start:], SHAPE.num_bytes, now)
        tickets = []
        for i, place in enumerate(places, start):
            if place is None:
                continue
            at = place.extent.offset
            record = self.view[at : at + SHAPE.num_bytes]
            self.places[place.ticket] = at
            block = ids[4 * i : 4 * i + 4].tobytes()
            write_header(record, hashes[i], hashes[i - 1] if i else ROOT, block, SHAPE)
            payload(record, SHAPE)[:8] = hashes[i][:8]
            seal(record, hashes[i], SHAPE)
            tickets.append(place.ticket)
        return tickets

    def put(self, tokens: Sequence[int], now: float = 0.0) -> None:
        self.tier.commit(self.write(tokens, now=now), "salt")

    def resident(self, tokens: Sequence[int]) -> int:
        hashes = extend_chain(ROOT, as_token_ids(tokens), 4)
        return self.tier.match(hashes, len(hashes), 0.0).num_blocks

    def balanced(self) -> bool:
        tier = self.tier
        return tier.free_bytes + tier.used_bytes + tier.reserved_bytes == tier.capacity_bytes


def test_a_block_is_visible_only_after_its_commit() -> None:
    """Reserve, write, commit."""
    writer = Writer(4)
    tickets = writer.write(range(8))
    assert writer.resident(range(8)) == 0
    assert writer.tier.reserved_bytes == 2 * SHAPE.num_bytes
    writer.tier.commit(tickets, "salt")
    assert writer.resident(range(8)) == 2
    assert writer.tier.reserved_bytes == 0
    assert writer.balanced()


def test_a_record_that_was_never_written_is_not_committed() -> None:
    """A commit without its bytes is refused and its room is free again."""
    writer = Writer(4)
    tickets = writer.write(range(4))
    writer.view[writer.places[tickets[0]]] = 0
    writer.tier.commit(tickets, "")
    assert writer.resident(range(4)) == 0
    assert writer.tier.free_bytes == writer.tier.capacity_bytes
    assert writer.tier.counters.blocks_refused == 1


def test_a_full_tier_evicts_the_tail_of_the_prompt_used_longest_ago() -> None:
    """The other prompt stays whole, the old one keeps its head."""
    writer = Writer(4)
    writer.put(range(8))
    writer.put(range(100, 108))
    assert writer.resident(range(100, 108)) == 2
    writer.put(range(200, 204))
    assert writer.resident(range(8)) == 1
    assert writer.resident(range(100, 108)) == 2
    assert writer.tier.counters.removals[Removal.CAPACITY] == 1
    assert writer.balanced()


def test_a_parent_does_not_go_to_make_room_for_its_child() -> None:
    """With everything else leased, the child is refused instead."""
    writer = Writer(1)
    writer.put(range(4))
    assert writer.write(range(8), start=1) == []
    assert writer.resident(range(8)) == 1
    assert writer.tier.counters.blocks_refused == 1


def test_a_leased_block_is_not_evicted_until_it_is_released() -> None:
    """Nor by a full tier, nor by clear()."""
    writer = Writer(2)
    writer.put(range(8))
    hashes = extend_chain(ROOT, as_token_ids(range(8)), 4)
    run = writer.tier.match(hashes, 0, 0.0)
    assert len(run.leased) == 2
    writer.put(range(50, 54))
    assert writer.tier.clear() == 0
    assert writer.resident(range(8)) == 2
    writer.tier.release(run.lease)
    assert writer.tier.clear() == 2
    assert writer.balanced()


def test_only_the_blocks_that_will_be_loaded_are_leased() -> None:
    """Those that the engine holds itself are not."""
    writer = Writer(4)
    writer.put(range(12))
    hashes = extend_chain(ROOT, as_token_ids(range(12)), 4)
    assert len(writer.tier.match(hashes, 2, 0.0).leased) == 1
    assert writer.tier.match(hashes, 3, 0.0).lease == 0


def test_a_lease_ends_by_itself() -> None:
    """An engine that died holds nothing for long."""
    writer = Writer(2)
    writer.put(range(8))
    hashes = extend_chain(ROOT, as_token_ids(range(8)), 4)
    writer.tier.match(hashes, 0, now=0.0)
    writer.tier.expire(now=29.0)
    assert writer.tier.num_leases == 1
    writer.tier.expire(now=31.0)
    assert writer.tier.num_leases == 0
    assert writer.tier.counters.leases_expired == 1


def test_a_reservation_ends_by_itself() -> None:
    """A writer that died in the middle of a save leaves no room taken."""
    writer = Writer(2)
    tickets = writer.write(range(8), now=0.0)
    writer.tier.expire(now=RESERVATION_S + 1)
    assert writer.tier.free_bytes == writer.tier.capacity_bytes
    writer.tier.commit(tickets, "")
    assert writer.resident(range(8)) == 0


def test_a_writer_that_comes_too_late_touches_nobody_elses_place() -> None:
    """Its ticket means nothing any more, though its offset belongs to another block by now."""
    writer = Writer(1)
    late = writer.write(range(4), now=0.0)
    writer.tier.expire(now=RESERVATION_S + 1)
    other = writer.write(range(40, 44), now=RESERVATION_S + 1)
    assert writer.places[late[0]] == writer.places[other[0]]
    writer.tier.commit(late, "")
    writer.tier.cancel(late)
    assert writer.resident(range(40, 44)) == 0
    writer.tier.commit(other, "")
    assert writer.resident(range(40, 44)) == 1


def test_the_places_of_a_writer_that_is_gone_are_free_again_soon() -> None:
    """An engine that crashed in the middle of a save can save the same blocks after its restart."""
    writer = Writer(2)
    writer.write(range(8))
    writer.tier.abandon(writer=0, now=1.0)
    writer.tier.expire(now=1.0 + ABANDONED_S)
    assert writer.tier.free_bytes == writer.tier.capacity_bytes
    assert len(writer.write(range(8))) == 2


def test_a_dropped_block_is_not_overwritten_while_somebody_reads_it() -> None:
    """Its bytes are free only when the last lease ends."""
    writer = Writer(2)
    writer.put(range(8))
    hashes = extend_chain(ROOT, as_token_ids(range(8)), 4)
    run = writer.tier.match(hashes, 0, 0.0)
    assert writer.tier.drop(hashes[0]) == 2
    assert writer.resident(range(8)) == 0
    assert writer.tier.free_bytes == 0
    assert writer.write(range(30, 34)) == []
    writer.tier.release(run.lease)
    assert writer.tier.free_bytes == writer.tier.capacity_bytes


def test_a_child_without_its_parent_is_not_taken() -> None:
    """It could never be matched."""
    writer = Writer(4)
    assert writer.write(range(8), start=1) == []
    assert writer.tier.counters.blocks_orphaned == 1


def test_two_writers_of_one_block_are_harmless() -> None:
    """The second one is told that there is nothing to write."""
    writer = Writer(4)
    first = writer.write(range(4))
    assert writer.write(range(4)) == []
    writer.tier.commit(first, "")
    assert writer.resident(range(4)) == 1
    assert writer.balanced()


def test_a_cancelled_reservation_gives_its_room_back() -> None:
    """And its parent may go again."""
    writer = Writer(2)
    writer.put(range(4))
    writer.tier.cancel(writer.write(range(8), start=1))
    assert writer.tier.clear() == 1
    assert writer.tier.free_bytes == writer.tier.capacity_bytes


def test_events_say_what_is_resident_with_tokens_parents_and_salt() -> None:
    """In vLLM's form: one event for a run, the salt with a prompt's first block."""
    writer = Writer(4)
    writer.put(range(8))
    hashes = extend_chain(ROOT, as_token_ids(range(8)), 4)
    (event,) = writer.published
    assert event == events.BlockStored(
        [*hashes], None, list(range(8)), 4, medium="CPU", extra_keys=[["salt"], None], group_idx=0
    )
    assert writer.tier.events_of(writer.tier.visible()) == [event]
    writer.tier.commit(writer.write(range(12), start=2), "salt")
    follow = writer.published[-1]
    assert isinstance(follow, events.BlockStored)
    assert follow.parent_block_hash == hashes[1]
    writer.tier.clear()
    gone = writer.published[-1]
    assert isinstance(gone, events.BlockRemoved)
    assert gone.block_hashes[-1] == hashes[0]

"""Event streams become residency in our own hashes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from prefix_store.base import BlockHash
from prefix_store.event_source import EventSource
from prefix_store.events import (
    REPORT_SESSION,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    decode_batch,
    encode,
)
from prefix_store.hashing import as_token_ids, extend_chain, routing_root
from prefix_store.residency import Holder, Medium, Residency

BLOCK = 4
DEVICE = Holder("engine-0", Medium.DEVICE)


class Rig:
    """A source with its residency, fed with events as they come off the wire."""

    def __init__(self, **options: Any) -> None:
        self.residency = Residency(1024**2)
        self.source = EventSource(
            "engine-0", self.residency, model="m", block_size=BLOCK, **options
        )

    def apply(self, *events: BlockStored | BlockRemoved | AllBlocksCleared) -> None:
        self.source.apply(decode_batch(encode(EventBatch(1.0, list(events)))))

    def run(self, tokens: list[int], salt: str = "", adapter: str = "") -> int:
        match = self.residency.match(chain(tokens, salt, adapter))
        return match.by_holder.get(DEVICE, 0)


def chain(tokens: list[int], salt: str = "", adapter: str = "") -> list[BlockHash]:
    return extend_chain(routing_root("m", salt, adapter), as_token_ids(tokens), BLOCK)


def stored(first: int, count: int, parent: int | None = None, **fields: Any) -> BlockStored:
    """Blocks that are named by their number and hold the tokens of their place."""
    fields.setdefault("medium", "GPU")
    fields.setdefault("group_idx", 0)
    return BlockStored(
        list(range(first, first + count)),
        parent,
        tokens_of(first, count),
        BLOCK,
        **fields,
    )


def tokens_of(first: int, count: int) -> list[int]:
    return list(range(first * BLOCK, (first + count) * BLOCK))


def test_chain_is_ours_whatever_the_publishers_hashes() -> None:
    """Blocks announced in several events form the chain that the gateway computes."""
    rig = Rig()
    rig.apply(stored(0, 2), stored(2, 1, parent=1))
    assert rig.run(tokens_of(0, 4)) == 3
    assert rig.run([9] * BLOCK) == 0
    assert rig.source.stats().blocks == 3


def test_salt_of_the_first_block_is_part_of_the_root() -> None:
    """Another tenant's blocks never match."""
    rig = Rig()
    rig.apply(stored(0, 2, extra_keys=[["secret"], None]))
    assert rig.run(tokens_of(0, 2), salt="secret") == 2
    assert rig.run(tokens_of(0, 2)) == 0


def test_adapter_and_salt_are_told_apart() -> None:
    """vLLM lists the adapter's name in every block and the salt in the first."""
    rig = Rig()
    rig.apply(stored(0, 2, lora_name="lora", extra_keys=[["lora", "secret"], ["lora"]]))
    assert rig.run(tokens_of(0, 2), "secret", "lora") == 2
    assert rig.run(tokens_of(0, 2), "secret") == 0
    assert rig.run(tokens_of(0, 2), adapter="lora") == 0


def test_images_make_other_blocks_of_equal_tokens() -> None:
    """Extra keys other than salt and adapter are hashed, so placeholders never match text."""
    rig = Rig()
    rig.apply(stored(0, 3, extra_keys=[["s"], [["image-digest", 1]], None]))
    assert rig.run(tokens_of(0, 3), salt="s") == 1
    before = rig.residency.stats().nodes
    rig.apply(stored(0, 3, extra_keys=[["s"], [["other-digest", 1]], None]))
    assert rig.residency.stats().nodes == before + 2


def test_removed_blocks_are_resident_no_more() -> None:
    """An entry leaves the map with its block; the block stays as seen."""
    rig = Rig()
    rig.apply(stored(0, 3))
    rig.apply(BlockRemoved([2], "GPU", 0), BlockRemoved([1], "GPU", 0))
    assert rig.run(tokens_of(0, 3)) == 1
    assert rig.residency.match(chain(tokens_of(0, 3))).seen_blocks == 3
    assert rig.source.stats().blocks == 1


def test_copies_of_one_block_count() -> None:
    """vLLM keeps equal blocks twice when two requests compute them at once, and says so twice.
    One copy that goes leaves the other."""
    rig = Rig()
    rig.apply(stored(0, 2), stored(0, 2))
    rig.apply(BlockRemoved([1], "GPU", 0))
    assert rig.run(tokens_of(0, 2)) == 2
    rig.apply(BlockRemoved([1], "GPU", 0), BlockRemoved([1], "GPU", 0))
    assert rig.run(tokens_of(0, 2)) == 1


def test_reports_of_reused_blocks_are_no_copies() -> None:
    """In the full report mode a request announces again what it reuses; one removal is the end of
    such a block. A block that was unknown is learned."""
    rig = Rig()
    rig.apply(stored(0, 2))
    for _ in range(3):
        rig.apply(stored(0, 4, session_id=REPORT_SESSION))
    assert rig.run(tokens_of(0, 4)) == 4
    assert rig.source.learned == 2
    rig.apply(BlockRemoved([3], "GPU", 0), BlockRemoved([1], "GPU", 0))
    assert rig.run(tokens_of(0, 4)) == 1
    assert rig.source.stats().blocks == 2


def test_what_a_reporting_request_computes_itself_is_counted_as_ever() -> None:
    """It comes below what was reused, in an event of its own, and may be a second copy."""
    rig = Rig()
    rig.apply(stored(0, 2), stored(2, 1, parent=1))
    rig.apply(
        stored(0, 2, session_id=REPORT_SESSION),
        stored(2, 1, parent=1, session_id=REPORT_SESSION),
        BlockRemoved([2], "GPU", 0),
    )
    assert rig.run(tokens_of(0, 3)) == 3
    rig.apply(BlockRemoved([2], "GPU", 0))
    assert rig.run(tokens_of(0, 3)) == 2


def test_reports_of_others_sessions_are_taken_for_copies() -> None:
    """Nothing tells them apart, so the removal of the block does not end it."""
    rig = Rig()
    rig.source.has_room(10)
    rig.apply(stored(0, 1), stored(0, 1, session_id="theirs"), BlockRemoved([0], "GPU", 0))
    assert rig.run(tokens_of(0, 1)) == 1
    assert rig.source.overcounts == 0


def test_more_copies_than_fit_prove_that_others_ask_for_reports(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is said once, in the log too. When all is told anew, repetitions from the start of a
    prompt are taken for reports: what was removed is gone, and what is there is known."""
    rig = Rig()
    rig.source.has_room(3)
    history = [
        stored(0, 2),
        stored(0, 2, session_id="theirs"),
        BlockRemoved([1], "GPU", 0),
        stored(5, 1),
    ]
    rig.apply(*history)
    assert rig.source.overcounts == 1
    rig.apply(stored(6, 1))
    assert rig.source.overcounts == 1
    assert rig.run(tokens_of(0, 2)) == 2  # wrong; the stream begins anew
    rig.source.clear()
    rig.apply(*history, stored(6, 1))
    assert rig.run(tokens_of(0, 2)) == 1
    assert rig.source.stats().blocks == 3
    rig.apply(stored(0, 1, session_id="theirs"), stored(1, 1, parent=0), stored(1, 1, parent=0))
    assert rig.source.learned == 0
    rig.apply(BlockRemoved([1], "GPU", 0))
    assert rig.run(tokens_of(0, 2)) == 2  # below another block it is a copy as ever
    assert rig.source.stats().overcounts == 1
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "engine-0 announced 4 blocks and has room for 3"
    ]


def test_room_is_that_of_the_sources_own_medium() -> None:
    """What an engine offloads elsewhere takes none of it; copies that were removed take none."""
    rig = Rig()
    rig.source.has_room(2)
    rig.apply(stored(0, 2), stored(0, 2, medium="CPU"), stored(2, 5, parent=1, medium="STORAGE"))
    rig.apply(BlockRemoved([1], "GPU", 0), stored(0, 1), BlockRemoved([0, 0], "GPU", 0))
    rig.apply(stored(0, 2))
    assert rig.source.overcounts == 0


def test_adapters_are_what_the_gateway_says_they_are() -> None:
    """One adapter under two names is one; its blocks stay until both of its names are gone."""
    roots = {"a": "digest", "b": "digest", None: ""}
    rig = Rig(root_of=lambda salt, name: routing_root("m", salt, roots[name]))
    rig.apply(
        stored(0, 2),
        BlockStored([10, 11], None, tokens_of(0, 2), BLOCK, lora_name="a", medium="GPU"),
        BlockStored([20, 21], None, tokens_of(0, 2), BLOCK, lora_name="b", medium="GPU"),
    )
    assert rig.run(tokens_of(0, 2), adapter="digest") == 2
    assert rig.run(tokens_of(0, 2)) == 2
    assert rig.source.stats().blocks == 4
    assert rig.source.is_whole
    rig.apply(BlockRemoved([11, 21], "GPU"), BlockRemoved([10], "GPU"))
    assert rig.run(tokens_of(0, 2), adapter="digest") == 1
    rig.apply(BlockRemoved([20], "GPU"))
    assert rig.run(tokens_of(0, 2), adapter="digest") == 0
    assert rig.source.stats().blocks == 2


def test_adapters_that_are_not_known_match_nothing_and_disturb_nothing() -> None:
    """Their blocks are counted; what follows them is no orphan, and the source stays whole."""
    rig = Rig(root_of=lambda salt, name: None if name else routing_root("m", salt))
    rig.apply(
        stored(0, 2, lora_name="new"),
        stored(2, 1, parent=1, lora_name="new"),
    )
    assert rig.run(tokens_of(0, 3)) == rig.run(tokens_of(0, 3), adapter="new") == 0
    stats = rig.source.stats()
    assert (stats.unknown_adapters, stats.orphans, stats.blocks) == (2, 0, 3)
    assert rig.source.is_whole
    rig.apply(BlockRemoved([0, 1, 2], "GPU", 0))
    assert rig.residency.stats().resident_blocks == {DEVICE: 0}


def test_full_hashes_and_their_low_64_bits_name_one_block() -> None:
    """vLLM sends either; both are kept as 64 bits."""
    rig = Rig()
    rig.apply(BlockStored([bytes(24) + (7).to_bytes(8, "big")], None, tokens_of(0, 1), BLOCK))
    assert rig.run(tokens_of(0, 1)) == 1
    rig.apply(BlockRemoved([7]))
    assert rig.run(tokens_of(0, 1)) == 0


def test_two_blocks_of_one_name_are_noticed_and_harmless() -> None:
    """The older one is given up: what is believed to be there is there."""
    rig = Rig()
    other = [9] * BLOCK
    rig.apply(stored(0, 1), BlockStored([0], None, other, BLOCK, medium="GPU"))
    assert rig.source.stats().collisions == 1
    assert (rig.run(tokens_of(0, 1)), rig.run(other)) == (0, 1)
    rig.apply(BlockRemoved([0], "GPU"), BlockRemoved([0], "GPU"))
    assert rig.run(other) == 0
    assert rig.residency.stats().resident_blocks == {DEVICE: 0}
    assert rig.source.is_whole


@pytest.mark.parametrize(
    "event",
    [
        BlockStored([1, 2], None, list(range(16)), 8, medium="GPU"),
        BlockStored([1], None, [1, 2, 3], BLOCK),
        BlockStored([1], None, [1, 2, 3, 2**40], BLOCK),
        BlockStored([1, 2, 3, 4], None, tokens_of(0, 4), BLOCK),
    ],
    ids=["other block size", "too few tokens", "no token id", "too many blocks"],
)
def test_source_is_whole_until_something_is_left_out(event: BlockStored) -> None:
    """And again when it starts from nothing."""
    rig = Rig(max_blocks=3)
    rig.apply(stored(0, 2))
    assert rig.source.is_whole
    rig.apply(event)
    assert not rig.source.is_whole
    rig.apply(AllBlocksCleared())
    assert rig.source.is_whole


def test_source_is_not_whole_where_the_index_had_no_room() -> None:
    """Blocks that it forgot are still there; their names are given up when they are many."""
    rig = Rig(max_blocks=10_000)
    for first in range(0, 8_000, 50):
        rig.apply(stored(first, 50))
    stats = rig.residency.stats()
    assert stats.evicted_resident > 0
    assert not rig.source.is_whole
    assert rig.source.stats().blocks < stats.nodes * 9 / 8 + 1_100


def test_closed_source_holds_nothing_and_hears_nothing() -> None:
    """A replica that was removed; its last events may still be under way."""
    rig = Rig()
    rig.apply(stored(0, 2))
    rig.source.close()
    assert rig.run(tokens_of(0, 2)) == 0
    rig.apply(stored(0, 2))
    assert rig.run(tokens_of(0, 2)) == 0
    assert rig.residency.stats().resident_blocks == {}


@pytest.mark.parametrize("medium", ["GPU", "CPU", "STORAGE"])
def test_everything_cleared_clears_every_medium(medium: str) -> None:
    """/reset_prefix_cache and a new incarnation leave nothing."""
    rig = Rig()
    rig.apply(stored(0, 1), stored(0, 2, medium=medium))
    rig.apply(AllBlocksCleared())
    assert rig.residency.match(chain(tokens_of(0, 2))).by_holder == {}
    assert rig.source.stats().blocks == 0


def test_media_are_holders_of_their_own() -> None:
    """A block in host memory and on the device is removed from one without the other, and may
    have its parent in the other."""
    rig = Rig()
    rig.apply(stored(0, 1), stored(0, 1, medium="CPU"), stored(1, 1, parent=0, medium="CPU"))
    rig.apply(BlockRemoved([0], "GPU", 0))
    match = rig.residency.match(chain(tokens_of(0, 2)))
    assert match.by_holder == {Holder("engine-0", Medium.MEMORY): 2}


def test_a_stores_tiers_are_told_apart() -> None:
    """A block that is demoted leaves one and comes to the other; Redis is a medium like them."""
    rig = Rig(medium=Medium.MEMORY)
    rig.apply(
        stored(0, 3, medium="CPU"),
        stored(0, 2, medium="STORAGE"),
        BlockRemoved([2, 1], "CPU", 0),
        stored(2, 1, parent=1, medium="REDIS"),
    )
    resident = rig.residency.stats().resident_blocks
    assert {holder.medium: count for holder, count in resident.items()} == {
        Medium.MEMORY: 1,
        Medium.DISK: 2,
        Medium.REDIS: 1,
    }
    assert rig.source.stats().orphans == 0


def test_unknown_media_are_counted_and_ignored() -> None:
    """What an engine keeps in a place of its own is not on its device."""
    rig = Rig()
    rig.apply(stored(0, 1), stored(1, 1, parent=0, medium="P2P"), BlockRemoved([0], "P2P", 0))
    assert rig.run(tokens_of(0, 2)) == 1
    assert rig.source.stats().foreign_media == 2
    assert rig.source.stats().malformed == 0


def test_event_without_medium_means_the_sources_own() -> None:
    """Publishers that do not say where they keep blocks keep them where they are."""
    rig = Rig(medium=Medium.MEMORY)
    rig.apply(stored(0, 1, medium=None))
    match = rig.residency.match(chain(tokens_of(0, 1)))
    assert match.by_holder == {Holder("engine-0", Medium.MEMORY): 1}


def test_unknown_parent_is_an_orphan() -> None:
    """It is counted, so that the stream is replayed, and never attached anywhere."""
    rig = Rig()
    rig.apply(stored(5, 2, parent=4))
    assert rig.source.orphans == 2
    assert rig.source.stats().blocks == 0
    assert rig.residency.stats().nodes == 0


def test_other_block_sizes_are_refused_and_named() -> None:
    """Such blocks could never be matched with the gateway's prompts; doctor says so."""
    rig = Rig()
    rig.apply(BlockStored([1, 2], None, list(range(8 * 2)), 8, medium="GPU"))
    assert rig.source.stats().refused == 2
    assert rig.source.stats().refused_block_size == 8
    assert rig.source.stats().blocks == 0


def test_only_the_first_cache_group_counts() -> None:
    """Sliding-window groups announce and remove the same blocks at other times."""
    rig = Rig()
    rig.apply(stored(0, 1), stored(0, 1, group_idx=1), BlockRemoved([0], "GPU", 1))
    assert rig.run(tokens_of(0, 1)) == 1
    assert rig.source.stats().foreign_groups == 2


@pytest.mark.parametrize(
    "event",
    [
        BlockStored([1], None, [1, 2, 3], BLOCK),
        BlockStored([1], None, [1, 2, 3, 2**40], BLOCK),
        BlockStored([1], None, [1, 2, 3, 4], BLOCK, extra_keys=[None, None]),
    ],
    ids=["too few tokens", "no token id", "keys of another length"],
)
def test_contradictions_are_counted_and_harmless(event: BlockStored) -> None:
    """One bad event does not end the stream."""
    rig = Rig()
    rig.apply(event, stored(0, 1))
    assert rig.source.stats().malformed == 1
    assert rig.run(tokens_of(0, 1)) == 1


def test_map_is_bounded() -> None:
    """A publisher that never removes anything cannot grow the map for ever."""
    rig = Rig(max_blocks=3)
    rig.apply(stored(0, 5))
    assert rig.run(tokens_of(0, 5)) == 3
    assert rig.source.stats().blocks == 3
    assert rig.source.stats().overflow == 2
    rig.apply(stored(0, 3))
    assert rig.source.stats().overflow == 2
    rig.apply(*[BlockRemoved([2], "GPU", 0)] * 2, stored(0, 3))
    assert rig.run(tokens_of(0, 5)) == 3
    assert rig.source.stats().overflow == 2


def test_fields_of_newer_publishers_are_ignored() -> None:
    """The engine's own struct has more fields than ours."""

    class Newer(msgspec.Struct, tag="BlockStored"):
        block_hashes: list[int]
        parent_block_hash: int | None
        token_ids: list[int]
        block_size: int
        medium: str = "GPU"
        session_id: str = "s"
        ownership: str = "o"

    frame = msgspec.msgpack.encode([1.5, [Newer([1], None, [1, 2, 3, 4], BLOCK)], 0])
    rig = Rig()
    rig.source.apply(decode_batch(frame))
    assert rig.run([1, 2, 3, 4]) == 1

"""What an event stream does with single batches."""

from __future__ import annotations

from engine_adapter.event_stream import Answer, EventStream, Need
from prefix_store.events import (
    END_OF_REPLAY,
    AllBlocksCleared,
    BlockStored,
    EventBatch,
    encode,
)


class RecordingSink:
    """Keeps the times of the batches, which name them."""

    def __init__(self) -> None:
        self.applied: list[float] = []
        self.orphans = self.overcounts = 0

    def apply(self, batch: EventBatch) -> None:
        self.applied.append(batch.ts)
        if any(isinstance(e, BlockStored) and e.parent_block_hash == 404 for e in batch.events):
            self.orphans += 1

    def clear(self) -> None:
        self.applied.clear()


def payload(ts: float, parent: int | None = None) -> bytes:
    return encode(EventBatch(ts, [BlockStored([1], parent, [1], 1)]))


class Rig:
    """A stream that has been connected and has caught up with `count` batches, 0 to count - 1,
    published at 100, 101, ..."""

    def __init__(self, count: int) -> None:
        self.sink = RecordingSink()
        self.stream = EventStream(self.sink)
        self.stream.connected()
        self.replay(*((n, payload(100.0 + n)) for n in range(count)))

    def replay(self, *messages: tuple[int, bytes], end: bool = True) -> None:
        self.asked = self.stream.begin_replay()
        answer = None
        for sequence, body in messages:
            answer = self.stream.replayed(sequence.to_bytes(8, "big"), body)
            if answer is not None:
                break
        if answer is None:
            answer = self.stream.replayed(END_OF_REPLAY, b"") if end else Answer.NONE
        assert answer is not None
        self.stream.end_replay(answer)

    def live(self, sequence: int, ts: float) -> None:
        self.stream.live(sequence, payload(ts), now=ts + 0.25)


def test_first_connection_asks_from_the_beginning() -> None:
    """A late joiner learns all that the publisher still knows."""
    rig = Rig(3)
    assert rig.asked == 0
    assert rig.sink.applied == [100.0, 101.0, 102.0]
    assert rig.stream.need is Need.NOTHING
    assert not rig.stream.is_incomplete


def test_live_batches_that_the_replay_brought_are_skipped() -> None:
    """What was on its way during the replay is not applied twice."""
    rig = Rig(3)
    for sequence in (1, 2, 3):
        rig.live(sequence, 100.0 + sequence)
    assert rig.sink.applied == [100.0, 101.0, 102.0, 103.0]
    assert rig.stream.need is Need.NOTHING
    assert rig.stream.lag_s == 0.25


def test_lost_first_batch_is_a_gap() -> None:
    """A publisher that had published nothing begins with sequence 0."""
    rig = Rig(0)
    rig.live(1, 101.0)
    assert rig.sink.applied == []
    assert rig.stream.need is Need.CATCH_UP
    rig.replay((0, payload(100.0)), (1, payload(101.0)))
    assert rig.sink.applied == [100.0, 101.0]


def test_gap_is_filled_by_a_replay_from_the_last_known() -> None:
    """The last batch comes back as the proof that the publisher is the same."""
    rig = Rig(3)
    rig.live(5, 105.0)
    assert rig.stream.need is Need.CATCH_UP
    rig.replay(*((n, payload(100.0 + n)) for n in (2, 3, 4, 5)))
    assert rig.asked == 2
    assert rig.sink.applied == [100.0, 101.0, 102.0, 103.0, 104.0, 105.0]
    assert rig.stream.counters.gaps == 1
    assert rig.stream.incarnation == 1


def test_sequence_that_starts_again_is_a_restart() -> None:
    """Live batches that go backwards void everything, and the new life is replayed."""
    rig = Rig(3)
    rig.live(3, 103.0)
    rig.live(0, 200.0)
    assert rig.sink.applied == []
    assert rig.stream.incarnation == 2
    assert rig.stream.need is Need.REBUILD
    rig.replay((0, payload(200.0)))
    assert rig.sink.applied == [200.0]


def test_low_sequence_with_a_newer_time_is_a_restart() -> None:
    """Also when nothing came live before, so that the order alone tells nothing."""
    rig = Rig(3)
    rig.live(1, 200.0)
    assert rig.stream.incarnation == 2
    assert rig.sink.applied == []


def test_restart_between_two_connections_is_found_by_the_replay() -> None:
    """The new publisher has a batch of that number too, but published at another time."""
    rig = Rig(3)
    rig.stream.connected()
    assert rig.stream.need is Need.CATCH_UP
    rig.replay((2, payload(202.0)), (3, payload(203.0)))
    assert rig.stream.incarnation == 2
    assert rig.sink.applied == []
    rig.replay(*((n, payload(200.0 + n)) for n in range(4)))
    assert rig.asked == 0
    assert rig.sink.applied == [200.0, 201.0, 202.0, 203.0]


def test_publisher_that_does_not_know_our_last_batch_has_restarted() -> None:
    """An idle new publisher answers nothing at all."""
    rig = Rig(3)
    rig.stream.connected()
    rig.replay()
    assert rig.stream.incarnation == 2
    assert rig.sink.applied == []


def test_same_publisher_after_a_broken_connection_keeps_everything() -> None:
    """A connection that came back costs one batch, not the index."""
    rig = Rig(3)
    rig.stream.connected()
    rig.replay((2, payload(102.0)))
    assert rig.stream.incarnation == 1
    assert rig.sink.applied == [100.0, 101.0, 102.0]
    assert rig.stream.counters.resyncs == 0


def test_lost_history_is_thrown_away_and_said() -> None:
    """When the buffer no longer holds what was missed, removals may be among it."""
    rig = Rig(3)
    rig.live(90, 190.0)
    rig.replay((80, payload(180.0)), (81, payload(181.0)))
    assert rig.sink.applied == [180.0, 181.0]
    assert rig.stream.is_incomplete


def test_snapshot_makes_complete() -> None:
    """A publisher that starts its answer by clearing has told everything."""
    rig = Rig(3)
    rig.live(90, 190.0)
    snapshot = encode(EventBatch(190.0, [AllBlocksCleared(), BlockStored([1], None, [1], 1)]))
    rig.replay((90, snapshot))
    assert rig.sink.applied == [190.0]
    assert not rig.stream.is_incomplete
    rig.live(91, 191.0)
    assert rig.sink.applied == [190.0, 191.0]


def test_hole_in_the_answer_is_asked_again() -> None:
    """ZMQ drops what a queue cannot hold, also in a replay."""
    rig = Rig(3)
    rig.live(9, 109.0)
    rig.replay((2, payload(102.0)), (3, payload(103.0)), (5, payload(105.0)))
    assert rig.stream.need is Need.CATCH_UP
    rig.replay(*((n, payload(100.0 + n)) for n in range(3, 10)))
    assert rig.asked == 3
    assert rig.sink.applied == [100.0 + n for n in range(10)]


def test_unreachable_replay_after_a_gap_throws_away_and_goes_on_live() -> None:
    """What was lost may be a removal, so nothing old counts; new batches do."""
    rig = Rig(3)
    rig.live(5, 105.0)
    rig.replay(end=False)
    assert rig.sink.applied == []
    assert rig.stream.need is Need.REBUILD
    rig.live(6, 106.0)
    rig.live(7, 107.0)
    assert rig.sink.applied == [106.0, 107.0]
    rig.live(9, 109.0)
    assert rig.sink.applied == [109.0]
    rig.replay(*((n, payload(100.0 + n)) for n in range(10)))
    assert rig.sink.applied == [100.0 + n for n in range(10)]


def test_unanswered_check_loses_nothing() -> None:
    """Nothing is known to be missing, so everything known stays."""
    rig = Rig(3)
    rig.stream.ask(Need.CHECK)
    rig.replay(end=False)
    assert rig.stream.need is Need.CHECK
    assert rig.sink.applied == [100.0, 101.0, 102.0]
    assert rig.stream.counters.replays == 1


def test_stream_is_behind_until_its_replay_has_ended() -> None:
    """Not only until it was asked for; a look whether the end of a burst was missed is none."""
    rig = Rig(2)
    assert not rig.stream.is_behind
    rig.live(5, 105.0)
    assert rig.stream.is_behind
    rig.stream.begin_replay()
    assert rig.stream.is_behind
    for number in range(1, 6):
        rig.stream.replayed(number.to_bytes(8, "big"), payload(100.0 + number))
        assert rig.stream.is_behind
    answer = rig.stream.replayed(END_OF_REPLAY, b"")
    assert answer is not None
    rig.stream.end_replay(answer)
    assert not rig.stream.is_behind
    rig.stream.ask(Need.CHECK)
    rig.stream.begin_replay()
    assert not rig.stream.is_behind


def test_replay_that_begins_with_the_next_batch_proves_nothing() -> None:
    """Another publisher may have come as far; the last batch that was applied is not in its
    answer, so nothing that is known counts, and what lies before is unknown."""
    rig = Rig(4)
    rig.stream.connected()
    rig.replay(*((n, payload(200.0 + n)) for n in range(4, 7)))
    assert rig.asked == 3
    assert rig.sink.applied == [204.0, 205.0, 206.0]
    assert rig.stream.is_incomplete
    assert rig.stream.counters.resyncs == 1


def test_orphan_is_replayed_once_per_incarnation() -> None:
    """A publisher that keeps sending orphans does not make us ask for ever."""
    rig = Rig(1)
    rig.stream.live(1, payload(101.0, parent=404), 101.0)
    assert rig.stream.need is Need.REBUILD
    assert rig.stream.is_incomplete
    rig.replay((0, payload(100.0)), (1, payload(101.0, parent=404)))
    assert rig.stream.need is Need.NOTHING
    assert rig.stream.is_incomplete
    rig.stream.live(2, payload(102.0, parent=404), 102.0)
    assert rig.stream.need is Need.NOTHING


def test_orphan_that_a_replay_explains_is_forgotten() -> None:
    """Afterwards nothing is lacking."""
    rig = Rig(1)
    rig.stream.live(1, payload(101.0, parent=404), 101.0)
    rig.replay((0, payload(100.0)), (1, payload(101.0)))
    assert not rig.stream.is_incomplete


def test_more_than_can_be_there_is_built_anew() -> None:
    """Each time that the sink says so."""
    rig = Rig(1)
    rig.sink.overcounts = 1
    rig.live(1, 101.0)
    assert rig.stream.need is Need.REBUILD
    assert rig.stream.is_behind
    rig.replay((0, payload(100.0)), (1, payload(101.0)))
    assert rig.asked == 0
    assert rig.stream.counters.resyncs == 1
    assert rig.stream.need is Need.NOTHING
    rig.live(2, 102.0)
    assert rig.sink.applied == [100.0, 101.0, 102.0]
    assert rig.stream.need is Need.NOTHING


def test_undecodable_batch_is_counted_and_passed() -> None:
    """It keeps its place in the sequence, so the stream goes on without a replay."""
    rig = Rig(1)
    rig.stream.live(1, b"\xc1 nonsense", 101.0)
    rig.live(2, 102.0)
    assert rig.sink.applied == [100.0, 102.0]
    assert rig.stream.counters.malformed == 1
    assert rig.stream.need is Need.NOTHING


def test_new_incarnation_clears_at_once() -> None:
    """The health check need not wait for the replay."""
    rig = Rig(3)
    rig.stream.new_incarnation()
    assert rig.sink.applied == []
    assert rig.stream.need is Need.REBUILD
    assert rig.stream.incarnation == 2

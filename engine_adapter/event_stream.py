"""One publisher's stream of KV events, without the sockets: what is applied, what is asked again.

A replay starts with the last batch that was applied: if it comes back, the publisher is the one we
know; if not, it has restarted and everything learned before is thrown away.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol

import msgspec

from engine_adapter.event_sequence import EventSequence, Verdict
from prefix_store.events import END_OF_REPLAY, AllBlocksCleared, EventBatch, decode_batch


class EventSink(Protocol):
    """What batches are applied to (prefix_store.event_source.EventSource)."""

    def apply(self, batch: EventBatch) -> None:
        """Apply one batch; never raises on what a publisher sends."""

    def clear(self) -> None:
        """Everything that was applied counts no more."""

    @property
    def orphans(self) -> int:
        """Blocks below a parent that was never announced, since the start."""

    @property
    def overcounts(self) -> int:
        """Times it was found, since the start, that more is counted than can be there."""


class Need(enum.IntEnum):
    """How much is to be asked from the publisher."""

    NOTHING = 0
    CHECK = 1
    """Nothing is known to be missing; the last batch of a burst may be."""
    CATCH_UP = 2
    """Something was lost, or the connection is new."""
    REBUILD = 3
    """Start from nothing."""


class Answer(enum.Enum):
    """How a replay ended."""

    COMPLETE = "complete"
    TORN = "torn"
    """It brought something but not all."""
    RESTARTED = "restarted"
    """The publisher does not know the last batch that was applied here."""
    NONE = "none"


@dataclass(slots=True)
class EventCounters:
    """Counts since the start."""

    batches: int = 0
    events: int = 0
    num_bytes: int = 0
    gaps: int = 0
    replays: int = 0
    resyncs: int = 0
    """Times everything known of the publisher was thrown away."""
    malformed: int = 0
    """Messages that could not be understood."""


class EventStream:
    """Decides for each batch; `need` says what has to be replayed."""

    def __init__(self, sink: EventSink) -> None:
        self.counters = EventCounters()
        self.need = Need.REBUILD
        self.incarnation = 1
        """Lives of the publisher that were seen; 1 is the first."""
        self.lag_s: float | None = None
        """From publication until it was applied, of the newest live batch."""
        self.is_incomplete = False
        """The publisher no longer knows how some of its blocks began."""
        self._sink = sink
        self._sequence = EventSequence()
        self._known_orphans = sink.orphans
        self._known_overcounts = sink.overcounts
        self._rebuilt_for_orphans = False
        self._replay: Need | None = None
        self._replayed = 0

    @property
    def last_sequence(self) -> int | None:
        return self._sequence.last

    @property
    def is_behind(self) -> bool:
        """Something that was published is known to be missing, and asked for or to be asked."""
        return max(self.need, self._replay or Need.NOTHING) >= Need.CATCH_UP

    def ask(self, need: Need) -> None:
        """At least `need` is to be replayed."""
        self.need = max(self.need, need)

    def connected(self) -> None:
        """The connection is another one, and so may be the publisher."""
        self._sequence.forget_live()
        self.ask(Need.CATCH_UP if self._sequence.last is not None else Need.REBUILD)

    def new_incarnation(self) -> None:
        """The publisher has restarted: nothing that it had counts."""
        self.incarnation += 1
        self._rebuilt_for_orphans = False
        self._sequence.forget_live()
        self._forget()
        self.ask(Need.REBUILD)

    def forget(self) -> None:
        """What it said is too old to be believed."""
        self._forget()
        self.ask(Need.REBUILD)

    def lose(self) -> None:
        """Messages were dropped."""
        self.counters.gaps += 1
        self.ask(Need.CATCH_UP)

    def live(self, sequence: int, payload: bytes, now: float) -> None:
        """Take a live batch at the time `now`; when it cannot be applied, `need` rises."""
        batch, ts = self._decode(payload)
        verdict = self._sequence.live(sequence, ts)
        if verdict is Verdict.GAP and self.need is Need.REBUILD:
            # The publisher does not answer: go on from here, with what was surely not lost.
            self.counters.gaps += 1
            self._forget()
            verdict = self._sequence.live(sequence, ts)
        if verdict is Verdict.APPLY:
            if ts is not None:
                self.lag_s = max(0.0, now - ts)
            self._apply(batch)
        elif verdict is Verdict.GAP:
            self.lose()
        elif verdict is Verdict.RESTART:
            self.new_incarnation()

    def begin_replay(self) -> int:
        """The sequence to ask from. Answers what is needed until now."""
        self._replay, self.need = self.need, Need.NOTHING
        self._replayed = 0
        if self._replay is not Need.CHECK:
            self.counters.replays += 1
        return 0 if self._replay is Need.REBUILD else self._sequence.last or 0

    def replayed(self, sequence: bytes, payload: bytes) -> Answer | None:
        """Take a message of the answer. None: more will come."""
        if self._replayed == 0 and self._replay is Need.REBUILD:
            self._forget()
        if sequence == END_OF_REPLAY:
            if self._replayed:
                return Answer.COMPLETE
            if self._sequence.last is not None:
                return Answer.RESTARTED
            self._sequence.expect_first()
            return Answer.COMPLETE
        batch, ts = self._decode(payload)
        number = int.from_bytes(sequence, "big")
        is_first = self._replayed == 0
        verdict = self._sequence.replayed(number, ts, is_first=is_first)
        if verdict is Verdict.RESTART:
            return Answer.RESTARTED
        if verdict is Verdict.GAP:
            if not is_first:
                return Answer.TORN
            self._forget()  # what came between is forgotten there, and it may be removals
            verdict = self._sequence.replayed(number, ts, is_first=is_first)
        if verdict is Verdict.APPLY:
            if is_first and number > 0 and not _is_snapshot(batch):
                self.is_incomplete = True
            self._apply(batch)
        self._replayed += 1
        return None

    def end_replay(self, answer: Answer) -> None:
        """Draw the conclusions: what is still needed stands in `need`."""
        replay, self._replay = self._replay, None
        if answer is Answer.RESTARTED:
            self.new_incarnation()
        elif answer is Answer.TORN or (answer is Answer.NONE and self._replayed > 1):
            self.ask(Need.CATCH_UP)
        elif answer is Answer.NONE and replay is not None:
            if replay is Need.CATCH_UP:  # what was lost may be removals
                self._forget()
                replay = Need.REBUILD
            self.ask(replay)

    def _decode(self, payload: bytes) -> tuple[EventBatch | None, float | None]:
        try:
            batch = decode_batch(payload)
        except msgspec.DecodeError:
            self.counters.malformed += 1
            return None, None
        return batch, batch.ts

    def _apply(self, batch: EventBatch | None) -> None:
        if batch is None:
            return
        self.counters.batches += 1
        self.counters.events += len(batch.events)
        self._sink.apply(batch)
        if self._sink.overcounts != self._known_overcounts:
            self._known_overcounts = self._sink.overcounts
            self.ask(Need.REBUILD)
        if self._sink.orphans == self._known_orphans:
            return
        self._known_orphans = self._sink.orphans
        self.is_incomplete = True
        if self._replay is not Need.REBUILD and not self._rebuilt_for_orphans:
            self._rebuilt_for_orphans = True
            self.ask(Need.REBUILD)

    def _forget(self) -> None:
        if self._sequence.last is not None:
            self.counters.resyncs += 1
        self._sink.clear()
        self._sequence.reset()
        self.is_incomplete = False


def _is_snapshot(batch: EventBatch | None) -> bool:
    return (
        batch is not None and bool(batch.events) and isinstance(batch.events[0], AllBlocksCleared)
    )

"""An event stream against a publisher that restarts, over a wire that loses, delays and tears."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from engine_adapter.event_stream import Answer, EventStream, Need
from prefix_store.events import (
    END_OF_REPLAY,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    encode,
)

Event = BlockStored | BlockRemoved | AllBlocksCleared


class CountingSink:
    """Counts copies, so a batch that is applied twice or out of order shows."""

    def __init__(self) -> None:
        self.copies: Counter[int] = Counter()
        self.orphans = self.overcounts = 0

    def apply(self, batch: EventBatch) -> None:
        for event in batch.events:
            apply(self.copies, event)

    def clear(self) -> None:
        self.copies.clear()


def apply(copies: Counter[int], event: Event) -> None:
    if isinstance(event, AllBlocksCleared):
        copies.clear()
    elif isinstance(event, BlockStored):
        copies.update(int(h) for h in event.block_hashes if isinstance(h, int))
    else:
        copies.subtract(int(h) for h in event.block_hashes if isinstance(h, int))


@dataclass
class Publisher:
    """One incarnation, as vLLM's publisher behaves or as the store's does."""

    has_snapshots: bool
    buffer: deque[tuple[int, bytes]]
    copies: Counter[int] = field(default_factory=Counter)
    next: int = 0
    last_ts: float = 0.0

    def publish(self, ts: float, event: Event) -> tuple[int, bytes]:
        apply(self.copies, event)
        message = (self.next, encode(EventBatch(ts, [event])))
        self.buffer.append(message)
        self.next += 1
        self.last_ts = ts
        return message

    def answer(self, wanted: int) -> list[tuple[int, bytes]]:
        first = self.buffer[0][0] if self.buffer else self.next
        if self.has_snapshots and wanted < first:
            stored = BlockStored(list(self.copies.elements()), None, [], 1)
            batch = EventBatch(self.last_ts, [AllBlocksCleared(), stored])
            return [(self.next - 1, encode(batch))]
        return [message for message in self.buffer if message[0] >= wanted]


class StreamMachine(RuleBasedStateMachine):
    """Whatever happened, one undisturbed replay makes the stream agree with the publisher."""

    has_snapshots = True

    def __init__(self) -> None:
        super().__init__()
        self.clock = 0.0
        self.publisher = self.fresh()
        self.wire: deque[tuple[int, bytes]] = deque()
        self.sink = CountingSink()
        self.stream = EventStream(self.sink)
        self.paused = True

    def fresh(self) -> Publisher:
        return Publisher(self.has_snapshots, deque(maxlen=6))

    @rule(block=st.integers(0, 5), count=st.integers(1, 9))
    def publish_stored(self, block: int, count: int) -> None:
        for number in range(count):
            self.publish(BlockStored([block + number], None, [], 1))

    @rule(data=st.data())
    def publish_removed(self, data: st.DataObject) -> None:
        held = sorted((+self.publisher.copies).elements())
        if held:
            self.publish(BlockRemoved([data.draw(st.sampled_from(held))]))

    @rule(blocks=st.lists(st.integers(0, 5), min_size=2, max_size=4), data=st.data())
    def traffic(self, blocks: list[int], data: st.DataObject) -> None:
        """Everything until now and some of these arrive."""
        self.deliver([True] * len(self.wire), cut=None)
        for block in blocks:
            self.publish(BlockStored([block], None, [], 1))
        count = len(blocks)
        arrives = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
        self.deliver(arrives, cut=None)

    @rule()
    def publish_cleared(self) -> None:
        self.publish(AllBlocksCleared())

    def publish(self, event: Event) -> None:
        self.clock += 1.0
        self.wire.append(self.publisher.publish(self.clock, event))

    @rule(arrives=st.lists(st.booleans(), min_size=1, max_size=8), cut=st.none() | st.just(0))
    def deliver(self, arrives: list[bool], cut: int | None) -> None:
        """Some batches arrive, some are lost. None is taken while the publisher may be another."""
        if self.paused:
            self.replay(cut, lost=set())
        for has_arrived in arrives[: len(self.wire)]:
            sequence, payload = self.wire.popleft()
            if has_arrived:
                self.stream.live(sequence, payload, self.clock)

    @rule()
    def restart(self) -> None:
        self.publisher = self.fresh()
        self.wire.clear()
        self.paused = True
        self.stream.connected()

    @rule()
    def reconnect(self) -> None:
        self.wire.clear()
        self.paused = True
        self.stream.connected()

    @rule()
    def health_check_saw_a_restart(self) -> None:
        self.stream.new_incarnation()

    @rule(cut=st.none() | st.integers(0, 4), lost=st.sets(st.integers(1, 5), max_size=2))
    def replay(self, cut: int | None, lost: set[int]) -> None:
        """`cut`: after so many messages nothing comes any more; `lost`: these are left out."""
        if self.stream.need is Need.NOTHING:
            self.stream.ask(Need.CHECK)
        answer = self.publisher.answer(self.stream.begin_replay())
        result: Answer | None = None
        for number, (sequence, payload) in enumerate(answer[:cut]):
            if number in lost:
                continue
            result = self.stream.replayed(sequence.to_bytes(8, "big"), payload)
            if result is not None:
                break
        if result is None and cut is not None:
            result = Answer.NONE
        if result is None:
            result = self.stream.replayed(END_OF_REPLAY, b"")
        assert result is not None
        self.stream.end_replay(result)
        self.paused = False

    @rule()
    def settle(self) -> None:
        """At rest the stream knows what the publisher holds, each block as often."""
        for _ in range(4):
            self.replay(cut=None, lost=set())
            if self.stream.need is Need.NOTHING:
                break
        assert self.stream.need is Need.NOTHING
        last = self.publisher.next - 1
        assert self.stream.last_sequence == (last if last >= 0 else None)
        if self.has_snapshots or not self.stream.is_incomplete:
            assert +self.sink.copies == +self.publisher.copies
            assert not self.stream.is_incomplete
        for block, count in self.sink.copies.items():
            assert count <= self.publisher.copies[block]
        while self.wire:
            self.stream.live(*self.wire.popleft(), self.clock)
        assert self.stream.need is Need.NOTHING
        assert self.stream.last_sequence == (last if last >= 0 else None)

    def teardown(self) -> None:
        self.settle()


class StreamOfVllmMachine(StreamMachine):
    """vLLM's publisher has no snapshots: what its buffer lost stays unknown, and is said so."""

    has_snapshots = False


TestStreamMachine = StreamMachine.TestCase
TestStreamMachine.settings = settings(max_examples=300, stateful_step_count=30, deadline=None)
TestStreamMachine.__doc__ = "A publisher with snapshots is known exactly, whatever happened."
TestStreamOfVllmMachine = StreamOfVllmMachine.TestCase
TestStreamOfVllmMachine.settings = TestStreamMachine.settings
TestStreamOfVllmMachine.__doc__ = "One without is known exactly, or the stream says that it lacks."

"""An event source against an engine that keeps equal blocks in several copies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from prefix_store.event_source import EventSource
from prefix_store.events import (
    REPORT_SESSION,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
)
from prefix_store.hashing import as_token_ids, extend_chain, routing_root
from prefix_store.residency import Holder, Medium, Residency

BLOCK = 2
DEVICE = Holder("e", Medium.DEVICE)
ADAPTERS = (None, "name", "other name")
"""The last two are one adapter."""

Name = tuple[str | None, tuple[int, ...]]
paths = st.lists(st.integers(0, 1), min_size=1, max_size=4).map(tuple)
adapters = st.sampled_from(ADAPTERS)


class SourceMachine(RuleBasedStateMachine):
    """The model: how many copies the engine has of each block, by its own names. It says that no
    more fit than it ever had at once."""

    def __init__(self) -> None:
        super().__init__()
        self.residency = Residency(1024**2)
        self.source = EventSource(
            "e",
            self.residency,
            model="m",
            block_size=BLOCK,
            root_of=lambda salt, name: routing_root("m", salt, "digest" if name else ""),
        )
        self.copies: Counter[Name] = Counter()
        self.room = 0

    @rule(adapter=adapters, path=paths, start=st.integers(0, 3))
    def compute(self, adapter: str | None, path: tuple[int, ...], start: int) -> None:
        """A request computes a part of its prompt; what is before it is there."""
        while start >= len(path) or (start and not self.copies[adapter, path[:start]]):
            start -= 1
        for end in range(start, len(path)):
            self.copies[adapter, path[: end + 1]] += 1
        self.room = max(self.room, self.copies.total())
        self.source.has_room(self.room)
        self.send(self.stored(adapter, path, start))

    @rule(adapter=adapters, path=paths)
    def report(self, adapter: str | None, path: tuple[int, ...]) -> None:
        """A request reuses the start of its prompt, and says so."""
        run = self.run(path, {adapter})
        if run:
            event = self.stored(adapter, path[:run], 0)
            event.session_id = REPORT_SESSION
            self.send(event)

    @precondition(lambda self: self.copies)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        """One copy is evicted."""
        name = data.draw(st.sampled_from(sorted(self.copies, key=repr)))
        self.send(BlockRemoved([self.external(*name)], "GPU"))
        self.copies[name] -= 1
        self.copies = +self.copies

    @rule()
    def clear(self) -> None:
        self.send(AllBlocksCleared())
        self.copies.clear()

    @rule(path=paths)
    def match(self, path: tuple[int, ...]) -> None:
        for digest, names in (("", {None}), ("digest", {"name", "other name"})):
            tokens = as_token_ids([token for token in path for _ in range(BLOCK)])
            chain = extend_chain(routing_root("m", "", digest), tokens, BLOCK)
            held = self.residency.match(chain).by_holder.get(DEVICE, 0)
            assert held == self.run(path, names)

    @invariant()
    def counts_agree(self) -> None:
        blocks = {(bool(adapter), path) for adapter, path in self.copies}
        assert self.source.stats().blocks == len(blocks)
        assert self.residency.num_resident(DEVICE) == len(blocks)
        assert self.source.is_whole
        assert self.source.stats().collisions == self.source.orphans == 0
        assert self.source.overcounts == 0

    def run(self, path: tuple[int, ...], adapters: Collection[str | None]) -> int:
        length = 0
        while length < len(path) and any(self.copies[a, path[: length + 1]] for a in adapters):
            length += 1
        return length

    def stored(self, adapter: str | None, path: tuple[int, ...], start: int) -> BlockStored:
        return BlockStored(
            [self.external(adapter, path[: end + 1]) for end in range(start, len(path))],
            self.external(adapter, path[:start]) if start else None,
            [token for token in path[start:] for _ in range(BLOCK)],
            BLOCK,
            lora_name=adapter,
            medium="GPU",
        )

    def external(self, adapter: str | None, path: tuple[int, ...]) -> int:
        return int(f"{ADAPTERS.index(adapter) + 1}" + "".join(str(t) for t in path))

    def send(self, event: BlockStored | BlockRemoved | AllBlocksCleared) -> None:
        self.source.apply(EventBatch(0.0, [event]))


TestSourceMachine = SourceMachine.TestCase
TestSourceMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestSourceMachine.__doc__ = "What is believed of an engine is what it has, copies and names or not."

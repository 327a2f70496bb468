"""The tiers of one store as one: what a prefix finds, what is brought up, what goes down.

Memory is what engines copy from and to. A run that continues below memory is brought up where the
loading policy says so, and the request's lease covers it block by block as it arrives.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from policies.access import Access, Stop
from policies.loading import LoadCandidate, LoadDecision, Loading
from policies.prefill_cost import PrefillCost
from policies.retention import RetentionRule, decide
from prefix_store import protocol
from prefix_store.base import BlockHash
from prefix_store.demotions import Demotions
from prefix_store.extents import Extent
from prefix_store.lower_tier import LowerTier
from prefix_store.memory_tier import MatchedRun, MemoryTier
from prefix_store.pins import ANYBODY, PinGroup, PinOwner, Pins
from prefix_store.promotions import Promotions, Upward
from prefix_store.reservations import Place
from prefix_store.shared_lookups import SharedLookups

MAX_REQUESTS = 16_384
"""Remembered by id, so that what is said later of a request finds its blocks."""

MAX_ENGINES = 256


@dataclass(slots=True)
class _Request:
    access: Access
    last: BlockHash | None = None
    """Its deepest block."""


@dataclass(frozen=True, slots=True)
class Arriving:
    """A block on its way up and where it will lie."""

    block: Upward
    extent: Extent


class Hierarchy:
    """Plain calls on the event loop; `run` moves blocks down meanwhile."""

    def __init__(
        self,
        memory: MemoryTier,
        view: memoryview,
        lower: Sequence[LowerTier],
        *,
        loading: Loading,
        retention: Sequence[RetentionRule] = (),
        on_save: Sequence[LowerTier] = (),
        lookup_timeout_s: float = 0.05,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`lower`: from the tier next to memory downwards. `on_save`: those of them that get
        blocks as soon as they are saved. `view`: the arena."""
        self.memory = memory
        self.lower = list(lower)
        if self.lower:
            memory.stand_above(self.lower[0].__contains__)
        self.loading = loading
        self.retention = retention
        self._clock = clock
        self._promotions = Promotions(memory, view, clock)
        self._demotions = Demotions(memory, self.lower, list(on_save), clock)
        self._lookups = SharedLookups(lookup_timeout_s, clock)
        self._requests: OrderedDict[str, _Request] = OrderedDict()
        self._costs: OrderedDict[str, PrefillCost] = OrderedDict()

    async def run(self) -> None:
        """Until cancelled."""
        try:
            if self.lower:
                await self._demotions.run()
            else:
                await asyncio.Event().wait()
        finally:
            await self._lookups.close()
            await self._promotions.close()

    def match(self, asked: protocol.Match, engine: str) -> protocol.Matched:
        """The run of a prefix over all tiers."""
        now = self._clock()
        hashes = protocol.split_hashes(asked.hashes)
        if self._lookups.is_waiting(asked.request, hashes):
            return protocol.Matched(0, 0, [], pending=True)  # engines ask at each step
        access = self._access(asked, now)
        run = self.memory.match(hashes, asked.lease_from, now, access)
        last = hashes[run.num_blocks - 1] if run.num_blocks else None
        self._remember(asked.request, access, last)
        self.memory.note(hashes, access)
        offsets = [extent.offset for extent in run.leased]
        in_memory = protocol.Matched(run.num_blocks, run.lease, offsets)
        if not self.lower or not asked.record_bytes or asked.lease_from >= len(hashes):
            return in_memory
        for tier in self.lower:
            tier.gate.note(hashes, access)
        upward = self._look_below(asked.request, hashes, run.num_blocks, access)
        if upward is None:
            self.memory.release(run.lease)
            return protocol.Matched(run.num_blocks, 0, [], pending=True)
        decision = self._decide(asked, engine, run, upward)
        if not decision.num_blocks:
            return in_memory
        wanted = upward[: decision.num_blocks]
        parent = hashes[run.num_blocks - 1] if run.num_blocks else None
        extents = self._promotions.begin(
            parent, wanted, asked.record_bytes, access, decision.give_up_s
        )
        self._demotions.check_room()
        arriving = [Arriving(*pair) for pair in zip(wanted, extents, strict=False)]
        # Blocks that the engine has itself come up too: memory needs them above the others.
        skipped = max(0, asked.lease_from - run.num_blocks)
        return self._waiting_for(asked.request, access, in_memory, arriving, skipped)

    def progress(self, lease: int) -> protocol.Progressed:
        """How much of what a lease waits for is there."""
        progress = self._promotions.progress(lease)
        return protocol.Progressed(progress.arrived, progress.done)

    def release(self, lease: int) -> None:
        """The lease is not needed any more."""
        self._promotions.forget(lease)
        self.memory.release(lease)

    def reserve(self, asked: protocol.Reserve, writer: int) -> list[Place | None]:
        """Room in memory for blocks that an engine has computed."""
        parent = None if asked.is_root else BlockHash(asked.parent)
        hashes = protocol.split_hashes(asked.hashes)
        access = self._access_of(asked.request)
        places = self.memory.reserve(
            parent, hashes, asked.record_bytes, self._clock(), writer=writer, access=access
        )
        self._demotions.check_room()
        return places

    def commit(self, asked: protocol.Commit) -> None:
        """Blocks that an engine has saved."""
        access = self._access_of(asked.request)
        last = self.memory.commit(asked.tickets, asked.salt, access)
        if last is not None:
            self._remember(asked.request, access, last)
            self._demotions.saved(last)
        self._demotions.check_room()

    def computed(self, engine: str, step: protocol.Computed) -> None:
        """What a step of an engine took."""
        cost = self._costs.setdefault(engine, PrefillCost())
        self._costs.move_to_end(engine)
        if len(self._costs) > MAX_ENGINES:
            self._costs.popitem(last=False)
        cost.observe(step.num_tokens, step.attended, step.seconds)

    def outcome(self, outcome: protocol.Outcome) -> None:
        """How the answer to a request ended: its blocks may rank differently now."""
        request = self._requests.get(outcome.request_id)
        if request is None or outcome.stop not in set(Stop):
            return
        request.access.stop = Stop(outcome.stop)
        request.access.output_tokens = outcome.output_tokens
        request.access.ended_s = self._clock()
        if request.last is None:
            return
        self.memory.reconsider(request.last)
        for tier in self.lower:
            tier.reconsider(request.last)

    async def drop(self, block_hash: BlockHash) -> None:
        """Take a block that failed its check out everywhere."""
        self.memory.drop(block_hash)
        for tier in self.lower:
            await tier.drop(block_hash)

    async def clear(self) -> int:
        """Empty all tiers of what nobody uses, pinned or not; returns how many blocks went."""
        self.unpin(ANYBODY)
        num_blocks = self.memory.clear()
        for tier in self.lower:
            num_blocks += await tier.clear()
        return num_blocks

    def pins(self, owner: PinOwner) -> list[PinGroup]:
        """Pinned blocks of an owner in all tiers; empty texts match any."""
        now = self._clock()
        groups = (group for view in self._pin_views() for group in view.groups(now))
        return [group for group in groups if owner.matches(group.owner)]

    def unpin(self, owner: PinOwner) -> int:
        """End an owner's pins in all tiers."""
        now = self._clock()
        return sum(view.revoke(owner, now) for view in self._pin_views())

    def set_on_save(self, tiers: Sequence[LowerTier]) -> None:
        """Which tiers get blocks as soon as they are saved, from now on."""
        self._demotions.on_save = list(tiers)

    def expire(self) -> None:
        """Forget what nobody asks for any more."""
        self.memory.expire(self._clock())
        self._promotions.expire()
        self._lookups.expire()

    def _pin_views(self) -> list[Pins[Any]]:
        return [self.memory.pins, *(tier.pins for tier in self.lower)]

    def _access(self, asked: protocol.Match, now: float) -> Access:
        known = self._requests.get(asked.request)
        if known is not None:
            return known.access
        facts = asked.facts
        access = Access(
            time_s=now, tenant=facts.tenant, model=facts.model, session=facts.session,
            turn=facts.turn, prefix=facts.prefix, num_tokens=facts.num_tokens,
        )  # fmt: skip
        access.retention = decide(self.retention, access)
        return access

    def _access_of(self, request: str) -> Access:
        known = self._requests.get(request)
        return known.access if known is not None else Access(time_s=self._clock())

    def _remember(self, request: str, access: Access, last: BlockHash | None) -> None:
        if not request:
            return
        known = self._requests.setdefault(request, _Request(access))
        if last is not None:
            known.last = last
        self._requests.move_to_end(request)
        if len(self._requests) > MAX_REQUESTS:
            self._requests.popitem(last=False)

    def _look_below(
        self, request: str, hashes: Sequence[BlockHash], start: int, access: Access
    ) -> list[Upward] | None:
        """The run behind `start`, block by block from the highest tier that has it. None: a shared
        tier was asked and has not answered yet."""
        found: list[Upward] = []
        for tier in self.lower:
            reached = start + len(found)
            if reached == len(hashes):
                break
            if not tier.is_up:
                continue
            end = tier.match(hashes, access)
            if tier.settings.shared and end < len(hashes):
                there = self._lookups.ask(request, tier, hashes)
                if there is None:
                    return None
                end = max(end, there)
            found += [Upward(block_hash, tier) for block_hash in hashes[reached:end]]
        return found

    def _decide(
        self, asked: protocol.Match, engine: str, run: MatchedRun, upward: Sequence[Upward]
    ) -> LoadDecision:
        """What the engine would compute starts where neither its device nor memory has more."""
        computed_from = max(run.num_blocks, asked.lease_from)
        cost = self._costs.get(engine)
        context = computed_from * asked.block_tokens
        load_s: list[float | None] = []
        prefill_s: list[float | None] = []
        earlier_s: float | None = 0.0  # of the tiers before this one
        tier, num_bytes = upward[0].tier if upward else None, 0
        for i, block in enumerate(upward, run.num_blocks + 1):
            if block.tier is not tier:
                earlier_s, tier, num_bytes = load_s[-1], block.tier, 0
            num_bytes += asked.record_bytes
            seconds = block.tier.load_s(num_bytes)
            if seconds is None or earlier_s is None:
                load_s.append(None)
            else:
                load_s.append(earlier_s + seconds)
            num_tokens = max(0, i - computed_from) * asked.block_tokens
            prefill_s.append(cost.seconds(context, num_tokens) if cost is not None else None)
        return self.loading.decide(LoadCandidate(load_s, prefill_s))

    def _waiting_for(
        self,
        request: str,
        access: Access,
        in_memory: protocol.Matched,
        arriving: Sequence[Arriving],
        skipped: int,
    ) -> protocol.Matched:
        """The answer with what is on its way up, which the lease covers as it arrives."""
        waited = arriving[skipped:]
        lease = in_memory.lease or (self.memory.open_lease((), self._clock()) if waited else 0)
        if not waited or not lease:
            return in_memory
        self._promotions.wait_for(lease, [each.block.block_hash for each in waited])
        self._remember(request, access, waited[-1].block.block_hash)
        num_shared = sum(each.block.tier.settings.shared for each in waited)
        return protocol.Matched(
            in_memory.num_blocks + len(arriving),
            lease,
            in_memory.offsets + [each.extent.offset for each in waited],
            from_disk=len(waited) - num_shared,
            from_redis=num_shared,
        )

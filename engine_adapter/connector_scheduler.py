"""The connector's half in vLLM's scheduler: what to load, what to save. No bytes move here.

Every call is in the engine's scheduling loop, so the only thing it may wait for is one round trip
over the store's Unix socket; when the store is away, everything is a miss.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from engine_adapter.connector_orders import LoadOrder, Orders, SaveOrder, StepWork
from engine_adapter.loaded_adapters import LoadedAdapters, digest_in
from policies.prefill_cost import attended
from prefix_store import hashing
from prefix_store.base import BlockHash, Namespace, StoreError
from prefix_store.client import StoreClient
from prefix_store.link import StoreLink
from prefix_store.prompt_label import PromptLabel
from prefix_store.protocol import Facts
from prefix_store.record import RecordShape, is_block

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

LEASE_MARGIN_S = 2.0
MIN_PREFILL_TOKENS = 16
"""Steps of fewer tokens tell little of prefill; of them,"""

SHORT_STEPS_SAMPLED = 32
"""one in so many is timed."""

MISS_MEMORY_S = 0.05
"""A request that cannot be scheduled is asked about at every step; its miss is remembered."""


@dataclass(frozen=True, slots=True)
class _Lookup:
    """What the store had for a request, not yet turned into a load."""

    first_block: int
    num_blocks: int
    incarnation: int
    lease: int
    offsets: list[int]
    valid_until: float
    from_disk: int = 0
    from_redis: int = 0
    """Of the blocks, those at the end that are still on their way up."""


@dataclass(slots=True)
class _Tracked:
    """One request that the scheduler knows."""

    request: Request
    root: BlockHash
    adapter: str
    """Its identity; empty for none."""
    label: str
    """What the store's events say of the prompt (prompt_label.py)."""
    tokens: hashing.TokenIds = field(default_factory=lambda: hashing.as_token_ids([]))
    hashes: list[BlockHash] = field(default_factory=list)
    num_saved: int | None = None
    """Leading blocks that the store has or was sent; None before the store was asked."""
    lookup: _Lookup | None = None
    loading: LoadOrder | None = None
    load_failed: bool = False
    pending: bool = False
    """A shared tier has been asked and has not answered yet."""


class SchedulerHalf:
    """State of the requests in flight; bounded by the scheduler's own bookkeeping."""

    def __init__(
        self, link: StoreLink, block_size: int, adapters: LoadedAdapters, *, model: str = ""
    ) -> None:
        """`model`: the base model's name, where engines of several use the store."""
        self._link = link
        self._adapters = adapters
        self._model = model
        self._block_size = block_size
        self._namespace: Namespace | None = None
        self._shape: RecordShape | None = None
        self._tracked: dict[str, _Tracked] = {}
        self._loads: list[LoadOrder] = []
        self._short_steps = 0

    def introduce(self, namespace: Namespace, shape: RecordShape) -> None:
        """What the worker's handshake said; before it, everything is a miss."""
        self._namespace = namespace
        self._shape = shape

    def num_matched_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        """Tokens that can be loaded beyond the engine's own `num_computed_tokens`; None: ask again
        at the next step. May be called again and again for the same request: the answer is kept
        while its lease lasts."""
        tracked = self._track(request)
        if tracked is None or self._shape is None:
            return 0
        first_block = num_computed_tokens // self._block_size
        lookup = tracked.lookup
        now = time.monotonic()
        if lookup is not None and lookup.first_block == first_block and now < lookup.valid_until:
            return lookup.num_blocks * self._block_size
        self._forget(tracked)
        tracked.pending = False
        tracked.lookup = self._look_up(tracked, first_block, now)
        if tracked.pending:
            return None
        return tracked.lookup.num_blocks * self._block_size if tracked.lookup else 0

    def allocated(
        self, request: Request, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        """The scheduler has given a request its blocks and decided how much to load."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.lookup is None:
            return
        lookup = tracked.lookup
        num_blocks = num_external_tokens // self._block_size
        if num_blocks == 0:
            self._forget(tracked)
            return
        tracked.lookup = None
        stop = lookup.first_block + num_blocks
        in_memory = lookup.num_blocks - lookup.from_disk - lookup.from_redis
        from_disk = _part(num_blocks, in_memory, lookup.from_disk)
        from_redis = _part(num_blocks, in_memory + lookup.from_disk, lookup.from_redis)
        arriving = range(stop - from_disk - from_redis, stop)
        tracked.loading = LoadOrder(
            request.request_id,
            _report_id(request),
            lookup.incarnation,
            lookup.lease,
            lookup.valid_until,
            tracked.hashes[lookup.first_block : stop],
            lookup.offsets[:num_blocks],
            list(block_ids[lookup.first_block : stop]),
            preempted=request.num_preemptions > 0,
            from_disk=from_disk,
            from_redis=from_redis,
            arriving_tokens=[self._block_tokens(tracked, block) for block in arriving],
        )
        self._loads.append(tracked.loading)

    def orders(self, output: SchedulerOutput) -> Orders:
        """Loads decided since the last step, and saves of the blocks that this step completes."""
        saves: list[SaveOrder] = []
        blocks = output.kv_connector_block_state
        is_idle = not output.num_scheduled_tokens
        if self._link.client() is None or self._shape is None or blocks is None:
            return Orders(self.take_loads(), saves, is_idle=is_idle)
        for request_id, num_scheduled in output.num_scheduled_tokens.items():
            tracked = self._tracked.get(request_id)
            if tracked is None or tracked.num_saved is None:
                continue
            # Draft tokens and placeholders are not in num_tokens: only known tokens are saved.
            known = min(
                tracked.request.num_computed_tokens + num_scheduled, tracked.request.num_tokens
            )
            num_full = known // self._block_size
            if num_full <= tracked.num_saved or self._adapter_changed(tracked):
                continue
            block_ids = blocks.get_block_ids(request_id)
            # Block 0 is vLLM's placeholder for blocks that are not kept.
            if block_ids is not None and 0 not in block_ids[0][tracked.num_saved : num_full]:
                saves.append(self._save_order(tracked, num_full, block_ids[0]))
        return Orders(self.take_loads(), saves, self._step_work(output), is_idle)

    def _adapter_changed(self, tracked: _Tracked) -> bool:
        """Since the request began, so that this step may have computed with the new one."""
        return self._adapters.identity(tracked.request.lora_request) != tracked.adapter

    def _step_work(self, output: SchedulerOutput) -> StepWork | None:
        """What this step computes; None when some of it is not known here."""
        num_tokens, looked_at = 0, 0.0
        for request_id, num_scheduled in output.num_scheduled_tokens.items():
            tracked = self._tracked.get(request_id)
            if tracked is None:
                return None
            num_tokens += num_scheduled
            looked_at += attended(tracked.request.num_computed_tokens, num_scheduled)
        if num_tokens >= MIN_PREFILL_TOKENS:
            return StepWork(num_tokens, looked_at)
        self._short_steps += 1
        sampled = num_tokens > 0 and self._short_steps % SHORT_STEPS_SAMPLED == 0
        return StepWork(num_tokens, looked_at) if sampled else None

    def take_loads(self) -> list[LoadOrder]:
        """Loads decided since the last call."""
        loads, self._loads = self._loads, []
        return loads

    def loaded(self, request_ids: set[str], failed_block_ids: set[int]) -> None:
        """Loads that ended. A request whose load failed computes and does not try again."""
        for request_id in request_ids:
            tracked = self._tracked.get(request_id)
            if tracked is None or tracked.loading is None:
                continue
            order, tracked.loading = tracked.loading, None
            bad = [i for i, block in enumerate(order.block_ids) if block in failed_block_ids]
            if bad:
                tracked.load_failed = True
                first = tracked.hashes.index(order.hashes[bad[0]])
                tracked.num_saved = min(tracked.num_saved or 0, first)

    def finished(self, request: Request) -> None:
        """A request has ended, for whatever reason."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is not None:
            self._forget(tracked)

    def clear_store(self) -> bool:
        """Empty the store (vLLM's reset of external caches)."""
        client = self._link.client()
        if client is None:
            return False
        try:
            client.clear()
        except StoreError:
            return False
        return True

    def _track(self, request: Request) -> _Tracked | None:
        """None for what cannot be keyed by token ids, adapter and salt alone."""
        tracked = self._tracked.get(request.request_id)
        adapter = self._adapters.identity(request.lora_request)
        if tracked is not None and tracked.adapter != adapter:
            self.finished(request)
            return None
        if tracked is None:
            if self._namespace is None or request.mm_features or request.prompt_embeds is not None:
                return None
            if adapter is None:
                return None
            salt = request.cache_salt or ""
            root = hashing.namespace_root(replace(self._namespace, adapter=adapter), salt)
            label = PromptLabel(salt, digest_in(adapter), self._model).encode()
            tracked = _Tracked(request, root, adapter, label)
            self._tracked[request.request_id] = tracked
        self._extend(tracked)
        return tracked

    def _extend(self, tracked: _Tracked) -> None:
        """Hash the blocks that became full since the last call."""
        size = self._block_size
        start = len(tracked.hashes) * size
        stop = tracked.request.num_tokens // size * size
        if stop <= start:
            return
        new = hashing.as_token_ids(tracked.request.all_token_ids[start:stop])
        parent = tracked.hashes[-1] if tracked.hashes else tracked.root
        tracked.hashes.extend(hashing.extend_chain(parent, new, size))
        tracked.tokens = np.concatenate([tracked.tokens, new])

    def _block_tokens(self, tracked: _Tracked, block: int) -> bytes:
        size = self._block_size
        return tracked.tokens[block * size : (block + 1) * size].tobytes()

    def _look_up(self, tracked: _Tracked, first_block: int, now: float) -> _Lookup | None:
        client = self._link.client()
        if client is None or not tracked.hashes:
            tracked.num_saved = 0 if client is not None else tracked.num_saved
            return None
        may_load = not tracked.load_failed and not tracked.request.skip_reading_prefix_cache
        lease_from = first_block if may_load else len(tracked.hashes)
        assert self._shape is not None
        try:
            matched = client.match(
                tracked.hashes,
                lease_from,
                request=_report_id(tracked.request),
                record_bytes=self._shape.num_bytes,
                block_tokens=self._block_size,
                facts=_facts(tracked.request),
            )
        except StoreError as error:
            logger.warning("%s", error)
            return None
        if matched.pending:
            tracked.pending = True
            return None
        tracked.num_saved = max(tracked.num_saved or 0, matched.num_blocks)
        # The engine computes at least the last token itself.
        most = max(0, (tracked.request.num_tokens - 1) // self._block_size - first_block)
        in_memory = len(matched.offsets) - matched.arriving
        offsets = self._verified(tracked, client, first_block, matched.offsets[:in_memory][:most])
        from_disk = from_redis = 0
        if len(offsets) == min(in_memory, most):
            from_disk = _part(most, in_memory, matched.from_disk)
            from_redis = _part(most, in_memory + matched.from_disk, matched.from_redis)
            offsets = matched.offsets[: len(offsets) + from_disk + from_redis]
        welcome = client.welcome
        lease_s = welcome.lease_s - LEASE_MARGIN_S if offsets else MISS_MEMORY_S
        lookup = _Lookup(
            first_block, len(offsets), welcome.incarnation, matched.lease, offsets, now + lease_s,
            from_disk, from_redis,
        )  # fmt: skip
        if not offsets and matched.lease:
            self._release(client, matched.lease)
            lookup = replace(lookup, lease=0)
        return lookup

    def _verified(
        self, tracked: _Tracked, client: StoreClient, first_block: int, offsets: list[int]
    ) -> list[int]:
        """The leading records that really are these blocks: hash, token ids and sizes."""
        assert self._shape is not None
        for i, offset in enumerate(offsets):
            block = first_block + i
            record = client.arena.view[offset : offset + self._shape.num_bytes]
            tokens = self._block_tokens(tracked, block)
            if not is_block(record, tracked.hashes[block], tokens, self._shape):
                logger.warning("a stored block is not what its hash says; it is dropped")
                self._drop(client, tracked.hashes[block])
                tracked.num_saved = block
                return offsets[:i]
        return offsets

    def _save_order(self, tracked: _Tracked, num_full: int, block_ids: Sequence[int]) -> SaveOrder:
        self._extend(tracked)
        first = tracked.num_saved or 0
        tracked.num_saved = num_full
        return SaveOrder(
            tracked.request.request_id,
            tracked.hashes[first - 1] if first else tracked.root,
            first == 0,
            tracked.label,
            tracked.hashes[first:num_full],
            list(block_ids[first:num_full]),
            [self._block_tokens(tracked, block) for block in range(first, num_full)],
            _report_id(tracked.request),
        )

    def _forget(self, tracked: _Tracked) -> None:
        """Give up a look-up whose load will not happen."""
        lookup, tracked.lookup = tracked.lookup, None
        client = self._link.client()
        if lookup is None or not lookup.lease or client is None:
            return
        if client.welcome.incarnation == lookup.incarnation:
            self._release(client, lookup.lease)

    def _release(self, client: StoreClient, lease: int) -> None:
        try:
            client.release(lease)
        except StoreError as error:
            logger.warning("%s", error)

    def _drop(self, client: StoreClient, block_hash: BlockHash) -> None:
        try:
            client.drop(block_hash)
        except StoreError as error:
            logger.warning("%s", error)


def _part(most: int, start: int, length: int) -> int:
    """How much of `length` blocks that begin at `start` lies below `most`."""
    return max(0, min(length, most - start))


def _facts(request: Request) -> Facts:
    """What the gateway said of the request; nothing when it said nothing, or not in this form."""
    given = (request.kv_transfer_params or {}).get("headstart.facts")
    try:
        return msgspec.convert(given, Facts) if given is not None else Facts()
    except msgspec.ValidationError:
        return Facts()


def _report_id(request: Request) -> str:
    given = (request.kv_transfer_params or {}).get("headstart.request_id")
    return given if isinstance(given, str) else request.request_id

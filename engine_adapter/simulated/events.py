"""The KV events of a simulated engine (engine_adapter.simulated), as vLLM's block pool words them.

They are collected step by step and published by prefix_store.event_publisher, whose wire format and
replay are those of vLLM's ZmqEventPublisher.
"""

from __future__ import annotations

from engine_adapter.simulated.sequence import Sequence
from prefix_store.base import BlockHash
from prefix_store.events import (
    MEDIUM_DEVICE,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    ExternalHash,
    KVEvent,
)


class EventLog:
    """What happened since the last `take`."""

    def __init__(self, block_size: int, *, enabled: bool) -> None:
        self._block_size = block_size
        self._enabled = enabled
        self._events: list[KVEvent] = []

    def stored(self, sequence: Sequence, first: int, end: int) -> None:
        """Blocks [first, end) of the sequence can be found now."""
        if not self._enabled or first >= end:
            return
        size = self._block_size
        hashes: list[ExternalHash] = list(sequence.hashes[first:end])
        job = sequence.job
        keys: list[list[str] | None] = [None] * (end - first)
        if job.adapter:
            keys = [[job.adapter] for _ in keys]
        if job.salt and first == 0:
            keys[0] = [*(keys[0] or ()), job.salt]
        self._events.append(
            BlockStored(
                block_hashes=hashes,
                parent_block_hash=sequence.hashes[first - 1] if first else None,
                token_ids=sequence.token_ids[first * size : end * size].tolist(),
                block_size=size,
                lora_id=job.adapter_number,
                medium=MEDIUM_DEVICE,
                lora_name=job.adapter,
                extra_keys=keys,
                group_idx=0,
            )
        )

    def removed(self, block_hash: BlockHash) -> None:
        """One copy of the block is gone."""
        if self._enabled:
            self._events.append(BlockRemoved([block_hash], medium=MEDIUM_DEVICE, group_idx=0))

    def cleared(self) -> None:
        """The whole cache is empty."""
        if self._enabled:
            self._events.append(AllBlocksCleared())

    def take(self) -> list[KVEvent]:
        """All of it, once."""
        events, self._events = self._events, []
        return events

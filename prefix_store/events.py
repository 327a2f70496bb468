"""KV events in vLLM's wire format: msgspec structs, tagged, in batches that are arrays.

Source: vllm/distributed/kv_events.py of vLLM 0.32. The store publishes the same structs, so one
subscriber serves both, and other routers can follow the store. Fields that are newer than this
copy are ignored by the decoder.
"""

from __future__ import annotations

from typing import Any

import msgspec

ExternalHash = bytes | int
"""vLLM's block hash: 32 bytes, or its low 64 bits as an integer (the engine's default)."""

MEDIUM_DEVICE = "GPU"
MEDIUM_MEMORY = "CPU"
MEDIUM_STORAGE = "STORAGE"
MEDIUM_REDIS = "REDIS"
"""Ours: vLLM knows the three above."""


class KVEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Base of the three events."""


class BlockStored(KVEvent):
    """Blocks that a holder has from now on, a run after `parent_block_hash`."""

    block_hashes: list[ExternalHash]
    parent_block_hash: ExternalHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    """One entry a block; the salt is in the first block's."""
    group_idx: int | None = None
    session_id: str | None = None
    """Of the request that stored or, in the full report mode, reused them."""


class BlockRemoved(KVEvent):
    """Blocks that a holder has no more."""

    block_hashes: list[ExternalHash]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(KVEvent):
    """The holder is empty."""


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What one step of an engine or of a store changed."""

    ts: float
    """time.time() at the publisher."""
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class BlocksLoaded(msgspec.Struct, tag=True, gc=False):
    """A connector has loaded stored blocks for a request. Published on its own topic, since it is
    not one of vLLM's events."""

    request_id: str
    """The id that the gateway gave the request for this purpose (`headstart.request_id` in its
    kv_transfer_params), else the engine's own id."""
    num_tokens: int
    """Loaded and checked."""
    promised_tokens: int
    """Counted as cached by the engine, which does not take back what failed to load."""
    num_bytes: int
    duration_s: float
    preempted: bool = False
    """True: a repeat after a preemption, which saves nothing and is not counted as reuse."""
    disk_tokens: int = 0
    """Part of num_tokens that came from the store's disk tier;"""
    redis_tokens: int = 0
    """and from its Redis tier. The rest was in its memory."""

    @property
    def ok(self) -> bool:
        """Whether everything was loaded."""
        return self.num_tokens == self.promised_tokens


REPORT_SESSION = "headstart-report"
"""Session of requests that make an engine announce again what it holds. Nothing else tells such
an event from that of a second copy of its blocks."""

TOPIC_BLOCKS = b"kv-events"
TOPIC_LOADS = b"kv-loads"

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)

_batch_encoder = msgspec.msgpack.Encoder()
_batch_decoder = msgspec.msgpack.Decoder(EventBatch)
_loaded_decoder = msgspec.msgpack.Decoder(BlocksLoaded)


def encode(message: EventBatch | BlocksLoaded) -> bytes:
    """The third frame of a message."""
    return _batch_encoder.encode(message)


def decode_batch(frame: bytes) -> EventBatch:
    """Raises msgspec.DecodeError for anything but an event batch."""
    return _batch_decoder.decode(frame)


def decode_loaded(frame: bytes) -> BlocksLoaded:
    """Raises msgspec.DecodeError for anything but a load report."""
    return _loaded_decoder.decode(frame)

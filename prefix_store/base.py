"""The words of the store: block hashes, namespaces, token spans and the errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

BlockHash = NewType("BlockHash", bytes)
"""16 bytes, xxh3_128 over the parent's hash, the block's token ids and extra keys. A chain: equal
hashes name an equal block after an equal prefix."""

HASH_BYTES = 16


@dataclass(frozen=True, slots=True)
class Namespace:
    """Everything that must be equal for KV bytes to be exchangeable between two engines."""

    weights: str
    """Digest of the model's weights and configuration."""
    adapter: str
    """Content digest of the LoRA adapter; empty for the base model."""
    dtype: str
    computation: str
    """Digest of what else changes KV values or their packing: engine version, quantization,
    configuration overrides, attention backend, instruction set or device."""
    kv_dtype: str
    kv_layout: str
    """Layout fingerprint: layer names in order, shape and strides of one block of one layer."""
    block_size: int
    """Tokens per block."""
    rank: int
    world_size: int


class StoreError(Exception):
    """Base of every error of this package. For the engine each of them means "miss"."""


class StoreUnavailableError(StoreError):
    """The store server cannot be reached, timed out, or the circuit breaker is open."""


class StoreProtocolError(StoreError):
    """The peer broke the protocol: an unknown message, a wrong version, a torn frame."""

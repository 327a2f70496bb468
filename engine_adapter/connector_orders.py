"""What the connector's scheduler half tells its worker half, and the handshake the other way."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
)

from prefix_store.base import BlockHash, Namespace
from prefix_store.record import RecordShape


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Copy leased records into a request's blocks."""

    request_id: str
    incarnation: int
    """Of the store that the offsets belong to."""
    lease: int
    deadline: float
    """time.monotonic() at which the lease no longer protects the records."""
    hashes: list[BlockHash]
    offsets: list[int]
    block_ids: list[int]
    preempted: bool


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """Copy a request's blocks, complete after this step, into the store."""

    request_id: str
    parent: BlockHash
    is_root: bool
    salt: str
    hashes: list[BlockHash]
    block_ids: list[int]
    tokens: list[bytes]
    """Of each block: int32 token ids."""


@dataclass
class Orders(KVConnectorMetadata):
    """Of one step."""

    loads: list[LoadOrder] = field(default_factory=list)
    saves: list[SaveOrder] = field(default_factory=list)


@dataclass
class WorkerIdentity(KVConnectorHandshakeMetadata):
    """What a worker knows once its KV cache exists. Without `namespace`, nothing is stored and
    `problem` says why."""

    namespace: Namespace | None
    shape: RecordShape | None
    problem: str = ""

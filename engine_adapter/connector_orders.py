"""What the connector's scheduler half tells its worker half."""

from __future__ import annotations

from dataclasses import dataclass, field

from prefix_store.base import BlockHash


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Copy leased records into a request's blocks."""

    request_id: str
    report_id: str
    """Under which the load is reported: the gateway's id for the request, else the engine's."""
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


@dataclass(frozen=True, slots=True)
class Orders:
    """Of one step."""

    loads: list[LoadOrder] = field(default_factory=list)
    saves: list[SaveOrder] = field(default_factory=list)

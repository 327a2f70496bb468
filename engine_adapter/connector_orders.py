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
    from_disk: int = 0
    """That many blocks, behind those in memory, are on their way from disk,"""
    from_redis: int = 0
    """and that many, at the end, from Redis."""
    arriving_tokens: list[bytes] = field(default_factory=list)
    """Of each block that is on its way: int32 token ids, to be compared when it is there."""

    @property
    def num_in_memory(self) -> int:
        """Leading blocks that were there and were checked when the order was given."""
        return len(self.offsets) - self.from_disk - self.from_redis


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """Copy a request's blocks, complete after this step, into the store."""

    request_id: str
    parent: BlockHash
    is_root: bool
    salt: str
    """The prompt's label: see prefix_store.prompt_label."""
    hashes: list[BlockHash]
    block_ids: list[int]
    tokens: list[bytes]
    """Of each block: int32 token ids."""
    report_id: str = ""
    """Under which the store knows the request."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """What the engine computes in one step."""

    num_tokens: int
    attended: float
    """Positions that these tokens attend to: see policies.prefill_cost."""


@dataclass(frozen=True, slots=True)
class Orders:
    """Of one step."""

    loads: list[LoadOrder] = field(default_factory=list)
    saves: list[SaveOrder] = field(default_factory=list)
    work: StepWork | None = None
    """None: nothing that is worth timing."""
    is_idle: bool = False
    """The step computes nothing: all requests wait."""

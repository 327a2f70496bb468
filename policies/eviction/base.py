"""Which block goes first when a tier is full: the contract between tiers and eviction policies.

The tier decides WHO may go: tail first (only blocks without children in the tier), never a leased
block, never one that is being written. A policy only orders those candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from policies.access import Access


class Block(Protocol):
    """A block in a tier, as a policy sees it. Identity is the object, not the hash: the same
    block may come again later as another object."""

    @property
    def hash(self) -> bytes: ...
    @property
    def depth(self) -> int:
        """Blocks before it in its prompt."""

    @property
    def num_tokens(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def inserted(self) -> int:
        """The tier's logical clock when it came."""

    @property
    def last_used(self) -> int:
        """The tier's logical clock when it was used last; equal for blocks used together."""

    @property
    def access(self) -> Access:
        """The request that used it last."""

    mark: Any
    """Whatever the policy wants to remember of it; None at first."""


B = TypeVar("B", bound=Block)


class EvictionQueue(Protocol[B]):
    """The candidates of one tier in the order in which they would go, and what the policy
    remembers of the tier's other blocks. O(log n) or better per operation and block; memory in
    proportion to the blocks in the tier."""

    def insert(self, block: B) -> None:
        """A new block is in the tier. Not a candidate yet."""

    def use(self, blocks: Sequence[B]) -> None:
        """A request found this run, heads first; last_used and access are already the new ones. A
        candidate among them is added again afterwards."""

    def add(self, block: B) -> None:
        """The block may go from now on. Again for one that is a candidate already: what is known
        of it has changed, so its rank may have."""

    def discard(self, block: B) -> None:
        """The block may not go any more (leased, got a child). Others are ignored."""

    def pop(self, now: float) -> B | None:
        """Take the next victim out of the candidates; None when there is none. `now`: on the clock
        of Access.time_s. A victim that stays after all is added again."""

    def remove(self, block: B) -> None:
        """The block has left the tier, after `pop` or for another reason. Not a candidate any
        more."""

    def admits(self, block: B, now: float) -> bool:
        """Whether a block that is not in the tier is worth the room of the next victim."""

    def __len__(self) -> int:
        """Candidates."""

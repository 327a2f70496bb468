"""What a tier below memory is made of: somewhere that keeps whole records by hash.

A backend moves bytes and knows nothing of policies: the tier above it (lower_tier.py) decides what
is written, read and removed, and holds the catalogue.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from prefix_store.base import BlockHash


@dataclass(frozen=True, slots=True)
class KeptBlock:
    """What a catalogue has to know of a record."""

    block_hash: BlockHash
    parent: BlockHash | None
    """None: the first block of a prompt."""
    num_tokens: int
    num_bytes: int
    """That count against the quota: of the record, and what the backend adds to keep it."""
    salt: str = ""
    """Of the tenant; only with the first block of a prompt."""
    token_ids: bytes = field(default=b"", compare=False)
    """int32, little-endian, for the events that announce the block; empty where only the record
    tells them."""
    record_bytes: int = field(default=0, compare=False)
    """Of the record alone: what `read` needs room for."""


@dataclass(frozen=True, slots=True)
class OutgoingRecord:
    """A record to be written. `data` does not change until the write has ended."""

    block: KeptBlock
    """`num_bytes` as `Backend.size_of` gave it."""
    data: memoryview


Arrived = Callable[[Sequence[KeptBlock]], None]
"""Told on the event loop, during a read, of the next blocks of the run: they are whole, checked and
may be used. Blocks behind one that is not there are not told of."""


class Backend(Protocol):
    """Every call may be cancelled. A fault of the medium is never raised: it is logged once in a
    while, counted, and answered with "not written" or "not there"."""

    @property
    def faults(self) -> int:
        """Of the medium, since the start."""

    @property
    def breaker(self) -> str:
        """closed, open or half_open; empty where there is no circuit breaker."""

    def resize(self, capacity_bytes: int) -> None:
        """Another quota, for backends that guard it themselves as well."""

    def size_of(self, record_bytes: int) -> int:
        """Bytes that a record takes there."""

    async def recover(self) -> list[KeptBlock]:
        """What is there at the start, parents before their children, no child without its parent;
        whatever else lies there is removed. Called once, before anything else. Raises StoreError
        when the medium cannot be used at all."""

    async def count(self, hashes: Sequence[BlockHash]) -> int:
        """How many of `hashes`, from the first on, are there. Only asked of shared backends, whose
        content others change; one round trip."""

    async def write(self, records: Sequence[OutgoingRecord]) -> list[bool]:
        """Write records, in this order; True where the record is there afterwards and whole."""

    async def read(
        self,
        hashes: Sequence[BlockHash],
        into: Sequence[memoryview],
        arrived: Arrived | None = None,
    ) -> list[KeptBlock | None]:
        """Read records, the first ones first; each buffer is as long as the record. None where it
        is not there, torn, of another length, or not intact (header, hash, checksum): what lies
        there is removed then."""

    async def remove(self, hashes: Sequence[BlockHash]) -> None:
        """Take records out; unknown ones are ignored."""

    async def close(self) -> None:
        """Finish what is under way and let go."""

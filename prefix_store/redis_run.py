"""A run of records whose values land one after another: each is checked, and told of soon."""

from __future__ import annotations

from collections.abc import Sequence

from prefix_store.arrivals import Arrivals
from prefix_store.backend import Arrived, KeptBlock
from prefix_store.base import BlockHash
from prefix_store.redis_fetch import Landed, Misfit, Reply
from prefix_store.redis_value import open_value

TELL_BYTES = 1024**2
"""Of records: whoever is told has some work each time."""


class RedisRun:
    """What has landed so far."""

    def __init__(
        self, hashes: Sequence[BlockHash], into: Sequence[memoryview], arrived: Arrived | None
    ) -> None:
        self.damaged: list[BlockHash] = []
        """There, but not as they were written."""
        self._hashes = hashes
        self._into = into
        self._arrivals = Arrivals(len(hashes), arrived)
        self._num_landed = 0
        self._untold_bytes = 0

    @property
    def blocks(self) -> list[KeptBlock | None]:
        return self._arrivals.blocks

    def landed(self, reply: Reply) -> None:
        """The next value is in its buffer, or will never be."""
        i = self._num_landed
        self._num_landed += 1
        block_hash, record = self._hashes[i], self._into[i]
        if isinstance(reply, Landed):
            self.blocks[i] = open_value(record, memoryview(reply.tail), block_hash)
        if self.blocks[i] is None and isinstance(reply, (Landed, Misfit)):
            self.damaged.append(block_hash)
        self._untold_bytes += len(record)
        if self._untold_bytes >= TELL_BYTES:
            self.tell()

    def tell(self) -> None:
        """Of all that has landed."""
        self._untold_bytes = 0
        self._arrivals.tell()

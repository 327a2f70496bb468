"""When blocks are used next: what no policy can know and the optimum does."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

from prefix_store.base import BlockHash
from prefix_store.simulation.trace import TraceRequest


class Future:
    """Time here is the number of the request, so requests of one millisecond are told apart."""

    def __init__(self, requests: Sequence[TraceRequest]) -> None:
        self._uses: dict[BlockHash, list[int]] = {}
        self.now = 0
        """The request that is being replayed."""
        for number, request in enumerate(requests):
            for name in request.chain:
                self._uses.setdefault(name, []).append(number)

    def next_use(self, block_hash: bytes) -> float:
        """The number of the next request, after the present one, that asks for the block; infinite
        when none does."""
        uses = self._uses.get(BlockHash(block_hash), [])
        position = bisect_right(uses, self.now)
        return uses[position] if position < len(uses) else math.inf

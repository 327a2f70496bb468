"""What has come of a run that is being read, told of in order."""

from __future__ import annotations

import itertools

from prefix_store.backend import Arrived, KeptBlock


class Arrivals:
    """Blocks may come in any order, and from any thread; `tell` is called on the event loop."""

    def __init__(self, num_blocks: int, arrived: Arrived | None) -> None:
        self.blocks: list[KeptBlock | None] = [None] * num_blocks
        """None: not there, or not read yet."""
        self._arrived = arrived
        self._num_told = 0

    def tell(self) -> None:
        """Of the blocks that carry on the run without a gap, and came since the last call."""
        rest = itertools.islice(self.blocks, self._num_told, None)
        news = [block for block in itertools.takewhile(bool, rest) if block is not None]
        self._num_told += len(news)
        if news and self._arrived is not None:
            self._arrived(news)

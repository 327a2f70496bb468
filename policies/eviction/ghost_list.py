"""Hashes of blocks that have left, the oldest first."""

from __future__ import annotations

from collections import OrderedDict


class GhostList:
    """Remembers that a block was here, not the block. Its owner bounds it with `trim`."""

    def __init__(self) -> None:
        # Not a plain dict: finding its first key steps over all that were deleted before it.
        self._hashes = OrderedDict[bytes, None]()

    def __len__(self) -> int:
        return len(self._hashes)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._hashes

    def add(self, block_hash: bytes) -> None:
        """As the newest; again for one that is here already."""
        self._hashes[block_hash] = None
        self._hashes.move_to_end(block_hash)

    def discard(self, block_hash: bytes) -> None:
        self._hashes.pop(block_hash, None)

    def trim(self, limit: int) -> None:
        """Forget the oldest until `limit` are left."""
        while len(self._hashes) > max(0, limit):
            self._hashes.popitem(last=False)

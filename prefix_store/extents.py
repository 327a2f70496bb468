"""Which bytes of the arena are free: first fit over a sorted list, neighbours merged on free."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

ALIGNMENT = 64
"""Records start on cache lines."""


@dataclass(frozen=True, slots=True)
class Extent:
    """A run of bytes."""

    offset: int
    num_bytes: int


class ExtentAllocator:
    """Hands out extents of any size. free + used = capacity at every moment."""

    def __init__(self, capacity_bytes: int) -> None:
        capacity_bytes -= capacity_bytes % ALIGNMENT
        self.capacity_bytes = capacity_bytes
        self.free_bytes = capacity_bytes
        self._offsets = [0] if capacity_bytes else []
        self._sizes = [capacity_bytes] if capacity_bytes else []

    @property
    def used_bytes(self) -> int:
        return self.capacity_bytes - self.free_bytes

    def allocate(self, num_bytes: int) -> Extent | None:
        """The first free run that is long enough; None when there is none."""
        size = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        for i, run in enumerate(self._sizes):
            if run < size:
                continue
            offset = self._offsets[i]
            if run == size:
                del self._offsets[i], self._sizes[i]
            else:
                self._offsets[i] += size
                self._sizes[i] -= size
            self.free_bytes -= size
            return Extent(offset, size)
        return None

    def free(self, extent: Extent) -> None:
        """Give an allocated extent back. Raises ValueError when part of it is free already."""
        offset, size = extent.offset, extent.num_bytes
        i = bisect.bisect_left(self._offsets, offset)
        overlaps_before = i > 0 and self._offsets[i - 1] + self._sizes[i - 1] > offset
        overlaps_after = i < len(self._offsets) and offset + size > self._offsets[i]
        if overlaps_before or overlaps_after or offset + size > self.capacity_bytes:
            raise ValueError(f"extent {offset}+{size} was not allocated")
        self.free_bytes += size
        joins_before = i > 0 and self._offsets[i - 1] + self._sizes[i - 1] == offset
        joins_after = i < len(self._offsets) and offset + size == self._offsets[i]
        if joins_before and joins_after:
            self._sizes[i - 1] += size + self._sizes[i]
            del self._offsets[i], self._sizes[i]
        elif joins_before:
            self._sizes[i - 1] += size
        elif joins_after:
            self._offsets[i] = offset
            self._sizes[i] += size
        else:
            self._offsets.insert(i, offset)
            self._sizes.insert(i, size)

"""Bit masks of holders, of which many blocks have equal ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

MASK_BYTES = 192
"""Memory of one mask and its entry in the table, for up to 512 holders."""

MANY = 64


class SharedMasks:
    """Masks that are equal are one object: there are few, however many blocks there are."""

    def __init__(self) -> None:
        self._all: dict[int, int] = {}
        self._limit = 0

    @property
    def memory_bytes(self) -> int:
        return len(self._all) * MASK_BYTES

    def shared(self, mask: int) -> int:
        """The one that stands for all that are equal."""
        return self._all.setdefault(mask, mask)

    def is_crowded(self, num_blocks: int) -> bool:
        """Worth a walk through all blocks: most masks here may be nobody's any more."""
        return len(self._all) > self._limit + MANY + num_blocks // 16

    def keep(self, in_use: Iterable[int]) -> None:
        """Forget all others."""
        self._all = {mask: mask for mask in in_use}
        self._limit = 2 * len(self._all)


def bits_of(mask: int) -> Iterator[int]:
    """The bits that are set, each as a mask."""
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit

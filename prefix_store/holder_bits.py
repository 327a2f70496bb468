"""Which bit of a mask stands for which holder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from prefix_store.bit_masks import bits_of
from prefix_store.match import Holder

ONCE_RESIDENT = 1
"""Bit of a mask that is nobody's: some holder has had the block. Stays when they lose it."""

_MAX_NAMED = 1024


class HolderBits:
    """One bit a holder. Bits of holders that left are given out again."""

    def __init__(self) -> None:
        self._bits: dict[Holder, int] = {}
        self._holders: dict[int, Holder] = {}
        self._named: dict[int, frozenset[Holder]] = {}
        """Of masks that came up lately, while the bits mean the same."""

    def find(self, holder: Holder) -> int:
        """Its mask, with one bit set; 0: it has none."""
        return self._bits.get(holder, 0)

    def take(self, holder: Holder) -> int:
        """Its mask; a new one where it has none."""
        bit = self._bits.get(holder)
        if bit is None:
            taken = ONCE_RESIDENT
            for other in self._holders:
                taken |= other
            bit = ~taken & (taken + 1)
            self._bits[holder] = bit
            self._holders[bit] = holder
            self._named.clear()
        return bit

    def free(self, holder: Holder) -> None:
        """It has gone. No mask may have its bit any more."""
        bit = self._bits.pop(holder, None)
        if bit is not None:
            del self._holders[bit]
            self._named.clear()

    def of(self, mask: int) -> Iterator[Holder]:
        """The holders whose bits are set."""
        return (self._holders[bit] for bit in bits_of(mask & ~ONCE_RESIDENT))

    def named(self, mask: int) -> frozenset[Holder]:
        """The same as a match names them, see Holder.assumed."""
        named = self._named.get(mask)
        if named is None:
            if len(self._named) >= _MAX_NAMED:
                self._named.clear()
            named = self._named[mask] = frozenset(
                replace(holder, assumed=False) if holder.assumed else holder
                for holder in self.of(mask)
            )
        return named

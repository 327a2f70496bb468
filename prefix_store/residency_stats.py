"""How large the index is, and what it had to forget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from prefix_store.match import Holder


@dataclass(frozen=True, slots=True)
class ResidencyStats:
    """Counts since the start, and sizes now."""

    nodes: int
    """Blocks known: resident, resident once, or only asked for."""
    resident_blocks: Mapping[Holder, int]
    memory_bytes: int
    """Upper bound, with the maps that events of its blocks need."""
    capacity_bytes: int
    evicted: int
    evicted_resident: int
    """Blocks forgotten although somebody has them: the index is too small to be exact."""
    unplaced: int
    """Blocks that a holder stored below a block which was forgotten here."""

"""What a tier counts."""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field


class Removal(enum.StrEnum):
    """Why a block went."""

    CAPACITY = "capacity"
    CORRUPT = "corrupt"
    CLEARED = "cleared"


@dataclass(slots=True)
class TierCounters:
    """Since the start."""

    matches: int = 0
    blocks_asked: int = 0
    blocks_matched: int = 0
    blocks_stored: int = 0
    blocks_duplicate: int = 0
    blocks_orphaned: int = 0
    blocks_refused: int = 0
    leases_expired: int = 0
    reservations_expired: int = 0
    removals: Counter[Removal] = field(default_factory=Counter)

"""Holders of blocks, and what they have of one prompt."""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field


class Medium(enum.StrEnum):
    """Where a holder keeps its blocks."""

    DEVICE = "device"
    MEMORY = "memory"
    DISK = "disk"
    REDIS = "redis"


@dataclass(frozen=True, slots=True)
class Holder:
    """A replica's device memory, or one tier of a store."""

    source: str
    """Id of the engine or store, such as "engine-0"."""
    medium: Medium
    assumed: bool = False
    """Nobody announced what it has: it is believed to have what was sent to it. A match names the
    holder that is meant, without this."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Blocks of a prompt that follow one another and are with the same holders."""

    start: int
    """In blocks; the first is 0."""
    end: int
    """Of the first block that is not in it."""
    holders: frozenset[Holder]


@dataclass(frozen=True, slots=True)
class Match:
    """What is known of one prompt. All lengths are contiguous runs of blocks from its start."""

    seen_blocks: int
    """Computed before: some holder has had them, wherever they are now. At least as long as the
    run of any holder."""
    by_holder: Mapping[Holder, int]
    """Only holders that have at least the first block."""
    stretches: tuple[Stretch, ...] = field(default=(), compare=False)
    """The blocks that are known here, in order."""

    def run_of(self, holders: Collection[Holder]) -> int:
        """The longest run of which each block is with at least one of `holders`: what a replica
        can reuse that reaches all of them, such as the start from memory and the rest from disk."""
        for stretch in self.stretches:
            if stretch.holders.isdisjoint(holders):
                return stretch.start
        if self.stretches:
            return self.stretches[-1].end
        return max((self.by_holder.get(holder, 0) for holder in holders), default=0)

    @property
    def available_blocks(self) -> int:
        """The longest run that one holder has."""
        return max(self.by_holder.values(), default=0)

"""Blocks on offer to a tier, and how they are moved a slice at a time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from prefix_store.backend import KeptBlock
from prefix_store.base import BlockHash
from prefix_store.record import read_header

T = TypeVar("T")

NOTHING = memoryview(b"")

SLICE_BYTES = 4 * 1024**2
"""Written and read at a time: small enough that what has come can be used meanwhile."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A block that may be kept, with its bytes, which do not change meanwhile."""

    block_hash: BlockHash
    parent: BlockHash | None
    token_ids: bytes
    salt: str
    data: memoryview
    """Empty for a block that is not to be written, since the tier has it."""

    def kept(self, num_bytes: int) -> KeptBlock:
        """For a catalogue."""
        return KeptBlock(
            self.block_hash, self.parent, len(self.token_ids) // 4, num_bytes, self.salt,
            self.token_ids, len(self.data),
        )  # fmt: skip


def offer_of(block: KeptBlock, data: memoryview) -> Offer:
    """A block of another tier; its record tells the tokens where its catalogue does not."""
    header = None if block.token_ids else read_header(data)
    tokens = header.token_ids if header is not None else block.token_ids
    return Offer(block.block_hash, block.parent, tokens, block.salt, data)


def with_data(offers: Sequence[Offer]) -> list[Offer]:
    """The leading offers that can be written."""
    return list(itertools.takewhile(lambda offer: len(offer.data) > 0, offers))


def slices(
    items: Sequence[T], size_of: Callable[[T], int], num_bytes: int = SLICE_BYTES
) -> list[list[T]]:
    """Batches of about `num_bytes`, at least one item each."""
    result: list[list[T]] = []
    size = num_bytes
    for item in items:
        if size >= num_bytes:
            result.append([])
            size = 0
        result[-1].append(item)
        size += size_of(item)
    return result

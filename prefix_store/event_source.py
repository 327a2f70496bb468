"""One engine's or store's event stream, translated into residency.

Publishers name blocks by hashes of their own (seeded, truncated, of another kind). Here the chain
is computed again from the token ids, so that the index speaks one language whoever published.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from prefix_store.base import BlockHash
from prefix_store.events import (
    MEDIUM_DEVICE,
    MEDIUM_MEMORY,
    MEDIUM_REDIS,
    MEDIUM_STORAGE,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    ExternalHash,
)
from prefix_store.hashing import TokenIds, as_token_ids, extend_chain, next_hash, routing_root
from prefix_store.residency import Holder, Medium, Residency

_MEDIA = {
    MEDIUM_DEVICE: Medium.DEVICE,
    MEDIUM_MEMORY: Medium.MEMORY,
    MEDIUM_STORAGE: Medium.DISK,
    MEDIUM_REDIS: Medium.REDIS,
}


class _Block:
    """One block that a holder has."""

    __slots__ = ("copies", "hash")

    def __init__(self, block_hash: BlockHash) -> None:
        self.hash = block_hash
        self.copies = 0
        """vLLM does not merge equal blocks: it reports each copy as stored and as removed."""


@dataclass(frozen=True, slots=True)
class SourceStats:
    """What one stream brought since the start, and what it holds now."""

    blocks: int
    """Distinct blocks that the source has now, in all its media."""
    orphans: int
    """Blocks stored below a parent that was never announced here."""
    foreign_groups: int
    """Events of KV cache groups other than the first (sliding windows and the like), ignored."""
    foreign_media: int
    """Events of media that are not known here (an engine's own offloading), ignored."""
    refused: int
    """Blocks of another size than the gateway's, which cannot be matched with prompts."""
    refused_block_size: int | None
    """The size they had, in tokens."""
    malformed: int
    """Events that contradict themselves."""
    overflow: int
    """Blocks left out since the source announced more than `max_blocks`."""


class EventSource:
    """The blocks of one source, by its own hashes. Bounded: an entry leaves with its block."""

    def __init__(
        self,
        source: str,
        residency: Residency,
        *,
        model: str,
        block_size: int,
        medium: Medium = Medium.DEVICE,
        max_blocks: int = 500_000,
    ) -> None:
        """`medium`: what an event without one means. `block_size`: tokens per block of the
        gateway's chains."""
        self._source = source
        self._residency = residency
        self._model = model
        self._block_size = block_size
        self._default_medium = medium
        self._max_blocks = max_blocks
        self._blocks: dict[Medium, dict[ExternalHash, _Block]] = {}
        self._orphans = 0
        self._foreign_groups = 0
        self._foreign_media = 0
        self._refused = 0
        self._refused_block_size: int | None = None
        self._malformed = 0
        self._overflow = 0

    def apply(self, batch: EventBatch) -> None:
        """Apply a batch. Never raises on what a publisher sends: oddities are counted."""
        for event in batch.events:
            if isinstance(event, BlockStored):
                self._stored(event)
            elif isinstance(event, BlockRemoved):
                self._removed(event)
            elif isinstance(event, AllBlocksCleared):
                self.clear()

    def clear(self) -> None:
        """The source is empty: a new incarnation, or it said so."""
        for medium in self._blocks:
            self._residency.clear(Holder(self._source, medium))
        self._blocks.clear()

    @property
    def orphans(self) -> int:
        return self._orphans

    def stats(self) -> SourceStats:
        return SourceStats(
            blocks=self._num_blocks,
            orphans=self._orphans,
            foreign_groups=self._foreign_groups,
            foreign_media=self._foreign_media,
            refused=self._refused,
            refused_block_size=self._refused_block_size,
            malformed=self._malformed,
            overflow=self._overflow,
        )

    @property
    def _num_blocks(self) -> int:
        return sum(len(blocks) for blocks in self._blocks.values())

    def _medium(self, name: str | None) -> Medium | None:
        """None, counted, for a medium that nobody here knows: it is on no replica's path."""
        medium = self._default_medium if not name else _MEDIA.get(name)
        self._foreign_media += medium is None
        return medium

    def _stored(self, event: BlockStored) -> None:
        count = len(event.block_hashes)
        medium = self._medium(event.medium)
        if medium is None or not self._is_usable(event, count):
            return
        parent = self._parent(event)
        if parent is None and event.parent_block_hash is not None:
            self._orphans += count
            return
        try:
            hashes = self._chain(event, parent)
        except (OverflowError, TypeError, ValueError):
            self._malformed += 1
            return
        blocks = self._blocks.setdefault(medium, {})
        new: list[BlockHash] = []
        for external, block_hash in zip(event.block_hashes, hashes, strict=True):
            block = blocks.get(external)
            if block is None:
                if self._num_blocks >= self._max_blocks:
                    break
                block = blocks[external] = _Block(block_hash)
            block.copies += 1
            new.append(block_hash)
        self._overflow += count - len(new)
        self._residency.store(Holder(self._source, medium), parent, new)

    def _is_usable(self, event: BlockStored, count: int) -> bool:
        if event.group_idx:
            self._foreign_groups += 1
            return False
        if event.block_size != self._block_size:
            self._refused += count
            self._refused_block_size = event.block_size
            return False
        keys = event.extra_keys
        if len(event.token_ids) != count * self._block_size or (keys and len(keys) != count):
            self._malformed += 1
            return False
        return count > 0

    def _removed(self, event: BlockRemoved) -> None:
        if event.group_idx:
            self._foreign_groups += 1
            return
        medium = self._medium(event.medium)
        if medium is None:
            return
        blocks = self._blocks.get(medium, {})
        for external in event.block_hashes:
            block = blocks.get(external)
            if block is None:
                continue
            block.copies -= 1
            if block.copies == 0:
                del blocks[external]
                self._residency.remove(Holder(self._source, medium), block.hash)

    def _parent(self, event: BlockStored) -> BlockHash | None:
        """Our hash of the event's parent, whichever medium it is in."""
        if event.parent_block_hash is None:
            return None
        for blocks in self._blocks.values():
            block = blocks.get(event.parent_block_hash)
            if block is not None:
                return block.hash
        return None

    def _chain(self, event: BlockStored, parent: BlockHash | None) -> list[BlockHash]:
        tokens = as_token_ids(event.token_ids)
        extras = [_without_adapter(keys, event.lora_name) for keys in event.extra_keys or ()]
        if parent is None:
            salt = ""
            if extras:
                salt, extras[0] = _split_salt(extras[0])
            parent = routing_root(self._model, salt, event.lora_name or "")
        if not any(extras):
            return extend_chain(parent, tokens, self._block_size)
        return _chain_with_extras(parent, tokens, self._block_size, extras)


def _without_adapter(keys: list[Any] | None, adapter: str | None) -> list[Any]:
    """A block's extra keys but the adapter's name, which vLLM puts first; it is in our root."""
    if not keys:
        return []
    if adapter is not None and keys[0] == adapter:
        return keys[1:]
    return list(keys)


def _split_salt(keys: list[Any]) -> tuple[str, list[Any]]:
    """The salt, and the other keys. Of what vLLM puts there only the salt is a bare string:
    multimodal keys are pairs, digests of embeddings are bytes."""
    salt = "".join(key for key in keys if isinstance(key, str))
    return salt, [key for key in keys if not isinstance(key, str)]


def _chain_with_extras(
    parent: BlockHash, tokens: TokenIds, block_size: int, extras: Sequence[list[Any]]
) -> list[BlockHash]:
    """A chain whose blocks depend on more than their tokens, such as images."""
    hashes = []
    for number, keys in enumerate(extras):
        block = tokens[number * block_size : (number + 1) * block_size]
        extra = msgspec.msgpack.encode(keys) if keys else b""
        parent = next_hash(parent, block.tobytes(), extra)
        hashes.append(parent)
    return hashes

"""A tier's visible blocks as KV events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from prefix_store import events
from prefix_store.base import BlockHash
from prefix_store.prompt_label import PromptLabel


@dataclass(frozen=True, slots=True)
class Announced:
    """What an event says of a block."""

    block_hash: BlockHash
    parent: BlockHash | None
    """None: the first block of a prompt."""
    token_ids: bytes
    """int32, little-endian."""
    salt: str
    """The prompt's label (prompt_label.py); only with its first block."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) // 4


def stored_events(stored: Sequence[Announced], medium: str) -> list[events.KVEvent]:
    """One event for each run of blocks that follow one another. Blocks whose tokens are not known
    cannot be announced."""
    result: list[events.KVEvent] = []
    last: BlockHash | None = None
    for block in stored:
        if not block.token_ids:
            continue
        tokens = np.frombuffer(block.token_ids, dtype="<i4").tolist()
        run = result[-1] if result else None
        follows = (
            isinstance(run, events.BlockStored)
            and block.parent is not None
            and block.parent == last
            and run.block_size == block.num_tokens
        )
        if follows and isinstance(run, events.BlockStored) and run.extra_keys is not None:
            run.block_hashes.append(block.block_hash)
            run.token_ids.extend(tokens)
            run.extra_keys.append(None)
        else:
            label = PromptLabel.decode(block.salt)
            result.append(
                events.BlockStored(
                    [block.block_hash],
                    block.parent,
                    tokens,
                    block.num_tokens,
                    medium=medium,
                    lora_name=label.lora_name,
                    extra_keys=[[label.salt] if label.salt else None],
                    group_idx=0,
                )
            )
        last = block.block_hash
    return result


def removed_event(hashes: Sequence[BlockHash], medium: str) -> events.KVEvent:
    """Blocks that left a tier."""
    gone: list[events.ExternalHash] = list(hashes)
    return events.BlockRemoved(gone, medium)

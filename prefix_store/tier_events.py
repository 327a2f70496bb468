"""A tier's visible blocks as KV events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from prefix_store import events
from prefix_store.base import BlockHash
from prefix_store.extents import Extent
from prefix_store.index import Node
from prefix_store.record import RecordHeader


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """Where a visible block lies."""

    extent: Extent
    salt: str
    """Of the tenant; only with the first block of a prompt."""


def stored_events(
    stored: Sequence[tuple[Node[StoredBlock], RecordHeader]],
) -> list[events.KVEvent]:
    """One event for each run of blocks that follow one another."""
    result: list[events.KVEvent] = []
    last: BlockHash | None = None
    for node, header in stored:
        tokens = np.frombuffer(header.token_ids, dtype="<i4").tolist()
        parent = node.parent.hash if node.parent is not None else None
        run = result[-1] if result else None
        follows = (
            isinstance(run, events.BlockStored)
            and parent is not None
            and parent == last
            and run.block_size == header.shape.num_tokens
        )
        if follows and isinstance(run, events.BlockStored) and run.extra_keys is not None:
            run.block_hashes.append(node.hash)
            run.token_ids.extend(tokens)
            run.extra_keys.append(None)
        else:
            keys = [node.value.salt] if node.value.salt else None
            result.append(
                events.BlockStored(
                    [node.hash],
                    parent,
                    tokens,
                    header.shape.num_tokens,
                    medium=events.MEDIUM_MEMORY,
                    extra_keys=[keys],
                    group_idx=0,
                )
            )
        last = node.hash
    return result

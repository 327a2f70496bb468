"""The hash chain of blocks.

A block hash is xxh3_128 (Yann Collet's xxHash, https://xxhash.com) over parent hash + token ids as
little-endian int32 + extra keys. xxHash is not collision-resistant: whoever loads a stored block
compares the token ids as well (verify or miss).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from prefix_store.base import BlockHash, Namespace

TokenIds = npt.NDArray[np.int32]


def as_token_ids(token_ids: Sequence[int] | TokenIds) -> TokenIds:
    """Token ids as a contiguous little-endian int32 array, shape (num_tokens,)."""
    return np.ascontiguousarray(token_ids, dtype="<i4")


def digest(*parts: str | bytes) -> BlockHash:
    """16 bytes over `parts`, each preceded by its length so that ("ab", "c") != ("a", "bc")."""
    h = xxhash.xxh3_128()
    for part in parts:
        raw = part.encode() if isinstance(part, str) else part
        h.update(len(raw).to_bytes(8, "little"))
        h.update(raw)
    return BlockHash(h.digest())


def namespace_root(namespace: Namespace, salt: str) -> BlockHash:
    """Root of the chain in a store: KV bytes are shared only below equal namespaces and salts."""
    n = namespace
    return digest(
        "headstart-kv-1",
        n.weights,
        n.adapter,
        n.dtype,
        n.computation,
        n.kv_dtype,
        n.kv_layout,
        str(n.block_size),
        str(n.rank),
        str(n.world_size),
        salt,
    )


def routing_root(model: str, salt: str, adapter: str = "") -> BlockHash:
    """Root of the chain in a gateway's index, where no KV bytes are exchanged."""
    return digest("headstart-route-1", model, adapter, salt)


def next_hash(parent: BlockHash, tokens: bytes, extra: bytes = b"") -> BlockHash:
    """Hash of the block with the int32 `tokens` after `parent`."""
    return BlockHash(xxhash.xxh3_128_digest(parent + tokens + extra))


def extend_chain(parent: BlockHash, token_ids: TokenIds, block_size: int) -> list[BlockHash]:
    """Hashes of the full blocks of `token_ids` that follow `parent`; a partial tail is left out."""
    raw = token_ids.data.cast("B") if token_ids.size else memoryview(b"")
    step = block_size * 4
    hashes: list[BlockHash] = []
    append = hashes.append
    block_digest = xxhash.xxh3_128_digest
    for start in range(0, len(raw) - step + 1, step):
        parent = BlockHash(block_digest(parent + raw[start : start + step]))
        append(parent)
    return hashes

"""From a publisher's event to our chain of block hashes: token ids, salt and extra keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from prefix_store.base import BlockHash
from prefix_store.events import BlockStored
from prefix_store.hashing import TokenIds, as_token_ids, extend_chain, next_hash


def chain_of(
    event: BlockStored,
    parent: BlockHash | None,
    block_size: int,
    root: Callable[[str], BlockHash],
) -> list[BlockHash]:
    """One hash a block, below `parent`; None: below the `root` of the event's salt.

    Raises OverflowError, TypeError, ValueError for what are no token ids or keys.
    """
    tokens = as_token_ids(event.token_ids)
    extras = [_without_adapter(keys, event.lora_name) for keys in event.extra_keys or ()]
    if parent is None:
        salt = ""
        if extras:
            salt, extras[0] = _split_salt(extras[0])
        parent = root(salt)
    if not any(extras):
        return extend_chain(parent, tokens, block_size)
    return _chain_with_extras(parent, tokens, block_size, extras)


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

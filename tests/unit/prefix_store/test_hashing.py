"""The chain of block hashes."""

from __future__ import annotations

import dataclasses

from prefix_store.base import Namespace
from prefix_store.hashing import (
    as_token_ids,
    digest,
    extend_chain,
    namespace_root,
    next_hash,
    routing_root,
)

NAMESPACE = Namespace("w", "", "bf16", "c", "bf16", "layout", 4, 0, 1)


def test_a_chain_covers_full_blocks_only() -> None:
    """A partial tail has no hash."""
    root = routing_root("m", "s")
    assert len(extend_chain(root, as_token_ids(range(11)), 4)) == 2
    assert extend_chain(root, as_token_ids([]), 4) == []


def test_a_chain_can_be_extended_where_it_ended() -> None:
    """Hashing in two steps equals hashing at once."""
    root = routing_root("m", "s")
    tokens = as_token_ids(range(16))
    whole = extend_chain(root, tokens, 4)
    head = extend_chain(root, tokens[:8], 4)
    assert head + extend_chain(head[-1], tokens[8:], 4) == whole
    assert next_hash(root, tokens[:4].tobytes()) == whole[0]


def test_equal_blocks_after_different_prefixes_differ() -> None:
    """A hash names the whole path."""
    root = routing_root("m", "s")
    one = extend_chain(root, as_token_ids([1, 2, 7, 7]), 2)
    two = extend_chain(root, as_token_ids([1, 3, 7, 7]), 2)
    assert one[1] != two[1]


def test_every_part_of_the_namespace_and_the_salt_counts() -> None:
    """KV bytes are exchanged only where all of it is equal."""
    changes = {"weights": "x", "adapter": "x", "dtype": "x", "computation": "x", "kv_dtype": "x",
               "kv_layout": "x",
               "block_size": 8, "rank": 1, "world_size": 2}  # fmt: skip
    assert set(changes) == {field.name for field in dataclasses.fields(Namespace)}
    roots = {namespace_root(NAMESPACE, "salt"), namespace_root(NAMESPACE, "other")}
    roots |= {
        namespace_root(dataclasses.replace(NAMESPACE, **{key: value}), "salt")  # type: ignore[arg-type]
        for key, value in changes.items()
    }
    assert len(roots) == 2 + len(changes)


def test_a_digest_keeps_its_parts_apart() -> None:
    """("ab", "c") is not ("a", "bc")."""
    assert digest("ab", "c") != digest("a", "bc")

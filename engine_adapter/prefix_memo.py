"""What is known of prompts seen before: their tokens and block hashes, as a tree of text pieces.

A node stands for a prefix of some prompt and holds only what its piece of text adds to its parent:
the tokens and the hashes of the blocks that became full. A prompt is looked up piece by piece from
the top of its root, so prompts of different roots (tenants) never share anything. The memo is
bounded in bytes; the least recently used leaf goes first.

Plain and synchronous: only the event loop touches it.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

from engine_adapter.base import Prompt
from engine_adapter.rendering_pieces import PieceSplitter
from prefix_store.base import HASH_BYTES, BlockHash
from prefix_store.hashing import TokenIds, extend_chain

_NODE_BYTES = 760
"""A node with its arrays' headers, its list of hashes and its places in the tree and in the order
of use; measured with tracemalloc."""
_HASH_BYTES = sys.getsizeof(b"") + HASH_BYTES + 16
"""A hash as a bytes object with its place in a list."""
_SHORT_BYTES = 360
_MAX_SHORT_CHARS = 64
_MAX_SHORT_PIECES = 256


@dataclass(frozen=True, slots=True)
class MemoKey:
    """Top of a tree of prompts."""

    root: BlockHash
    special_tokens: bool
    """Whether the tokenizer's own special tokens stand before the text."""


@dataclass(slots=True, eq=False)
class MemoNode:
    """A prefix of a prompt. Changed by `PrefixMemo` only."""

    parent: MemoNode | None
    piece: str
    token_ids: TokenIds
    """Of the piece alone."""
    hashes: tuple[BlockHash, ...]
    """Of the blocks that the piece completes. A tuple: the garbage collector does not visit it."""
    last_hash: BlockHash
    """Of the last full block of the prefix, or the root."""
    rest: TokenIds
    """Tokens of the prefix after its last full block."""
    num_tokens: int
    """Of the whole prefix."""
    size_bytes: int
    attached: bool = True
    """False once evicted; a prompt that is being rendered may still hold the node."""
    latest: MemoNode | None = None
    """The child that was used last: tried first, it spares looking for the end of the piece."""
    children: dict[str, MemoNode] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Top:
    """The empty prefix of one key."""

    key: MemoKey
    node: MemoNode
    short: dict[str, TokenIds] = field(default_factory=dict)
    """Tokens of short pieces, such as a template's own words, wherever they stand in the tree."""


@dataclass(frozen=True, slots=True)
class MemoMatch:
    """The longest known prefix of a text."""

    node: MemoNode
    end: int
    """Characters of the text that it covers."""


class PrefixMemo:
    """Tree of known prompt prefixes, bounded by `capacity_bytes`."""

    def __init__(self, splitter: PieceSplitter, block_size: int, capacity_bytes: int) -> None:
        self._splitter = splitter
        self._block_size = block_size
        self._capacity_bytes = capacity_bytes
        self._tops: dict[MemoKey, _Top] = {}
        # Oldest first. A prefix is never older than its extensions, so the first node is a leaf.
        self._by_use: OrderedDict[MemoNode, MemoKey] = OrderedDict()
        self.used_bytes = 0
        """Estimated, of everything kept."""

    def __len__(self) -> int:
        return len(self._by_use)

    def match(self, key: MemoKey, before: TokenIds, text: str) -> MemoMatch:
        """The longest known prefix of `text`, whose special tokens are `before`."""
        node = self._top(key, before).node
        end_of, ends_at = self._splitter.end, self._splitter.ends_at
        start, length = 0, len(text)
        while start < length:
            child = node.latest
            end = start + len(child.piece) if child else 0
            if not (child and text.startswith(child.piece, start) and ends_at(text, start, end)):
                end = end_of(text, start)
                child = node.children.get(text[start:end])
                if child is None:
                    break
                node.latest = child
            node, start = child, end
        return MemoMatch(node, start)

    def short_piece(self, key: MemoKey, piece: str) -> TokenIds | None:
        """Tokens of a short piece that some prompt below `key` has had."""
        top = self._tops.get(key) if len(piece) <= _MAX_SHORT_CHARS else None
        return top.short.get(piece) if top else None

    def extend(self, key: MemoKey, node: MemoNode, piece: str, token_ids: TokenIds) -> MemoNode:
        """The node for `piece` after `node`. Before anything else happens, `touch` the last one;
        call `settle` when the whole prompt is in."""
        if not node.attached:
            node = self._attach(key, node)
        child = node.children.get(piece)
        if child is None:
            child = self._node(node, piece, token_ids)
            node.children[piece] = child
            self._add(key, child)
            self._remember_short(self._tops[key], piece, token_ids)
        node.latest = child
        return child

    def touch(self, leaf: MemoNode) -> None:
        """Marks a prefix, and those it extends, as just used."""
        node: MemoNode | None = leaf
        move_to_end = self._by_use.move_to_end
        while node is not None and node.attached:
            move_to_end(node)
            node = node.parent

    def settle(self, leaf: MemoNode) -> None:
        """Ends a prompt: marks it as just used, then evicts what is too much."""
        self.touch(leaf)
        while self.used_bytes > self._capacity_bytes and self._by_use:
            self._evict_oldest()

    def prompt(self, leaf: MemoNode) -> Prompt:
        """The prompt that ends at `leaf`."""
        chain: list[MemoNode] = []
        node: MemoNode | None = leaf
        while node is not None:
            chain.append(node)
            node = node.parent
        chain.reverse()
        hashes: list[BlockHash] = []
        for node in chain:
            hashes += node.hashes
        return Prompt(
            num_tokens=leaf.num_tokens,
            block_hashes=hashes,
            pieces=[node.token_ids for node in chain],
        )

    def _top(self, key: MemoKey, before: TokenIds) -> _Top:
        top = self._tops.get(key)
        if top is None:
            top = _Top(key, self._first_node(key.root, before))
            self._tops[key] = top
            self._add(key, top.node)
        return top

    def _first_node(self, root: BlockHash, before: TokenIds) -> MemoNode:
        empty = MemoNode(None, "", before[:0], (), root, before[:0], 0, 0)
        first = self._node(empty, "", before)
        first.parent = None
        return first

    def _node(self, parent: MemoNode, piece: str, token_ids: TokenIds) -> MemoNode:
        pending = np.concatenate((parent.rest, token_ids)) if parent.rest.size else token_ids
        hashes: tuple[BlockHash, ...] = ()
        rest = pending
        if pending.size >= self._block_size:
            hashes = tuple(extend_chain(parent.last_hash, pending, self._block_size))
            rest = pending[len(hashes) * self._block_size :].copy()
        size_bytes = (
            _NODE_BYTES
            + sys.getsizeof(piece)
            + token_ids.nbytes
            + rest.nbytes
            + len(hashes) * _HASH_BYTES
        )
        return MemoNode(
            parent=parent,
            piece=piece,
            token_ids=token_ids,
            hashes=hashes,
            last_hash=hashes[-1] if hashes else parent.last_hash,
            rest=rest,
            num_tokens=parent.num_tokens + token_ids.size,
            size_bytes=size_bytes,
        )

    def _attach(self, key: MemoKey, node: MemoNode) -> MemoNode:
        """The node like `node`, which was evicted, that now stands in the tree."""
        lost: list[MemoNode] = []
        while not node.attached and node.parent is not None:
            lost.append(node)
            node = node.parent
        if not node.attached:
            node = self._top(key, node.token_ids).node
        for old in reversed(lost):
            node = self.extend(key, node, old.piece, old.token_ids)
        return node

    def _add(self, key: MemoKey, node: MemoNode) -> None:
        self._by_use[node] = key
        self.used_bytes += node.size_bytes

    def _remember_short(self, top: _Top, piece: str, token_ids: TokenIds) -> None:
        if len(piece) <= _MAX_SHORT_CHARS and piece not in top.short:
            if len(top.short) >= _MAX_SHORT_PIECES:
                return
            top.short[piece] = token_ids
            top.node.size_bytes += _SHORT_BYTES
            self.used_bytes += _SHORT_BYTES

    def _evict_oldest(self) -> None:
        node, key = self._by_use.popitem(last=False)
        self.used_bytes -= node.size_bytes
        node.attached = False
        if node.parent is None:
            del self._tops[key]
            return
        del node.parent.children[node.piece]
        if node.parent.latest is node:
            node.parent.latest = None

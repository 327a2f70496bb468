"""The memo of seen prompts: what it knows, whom it shares with, what it forgets."""

from __future__ import annotations

import re
import tracemalloc

from engine_adapter.prefix_memo import MemoKey, MemoNode, PrefixMemo
from engine_adapter.rendering_pieces import PieceSplitter
from prefix_store.base import BlockHash
from prefix_store.hashing import TokenIds, as_token_ids, extend_chain

SPLITTER = PieceSplitter(boundary=re.compile("<[a-z]>"), max_boundary_chars=3)
KEY = MemoKey(BlockHash(b"k" * 16), special_tokens=False)
OTHER = MemoKey(BlockHash(b"o" * 16), special_tokens=False)
NONE = as_token_ids([])
BLOCK_SIZE = 4


def ids(text: str) -> TokenIds:
    return as_token_ids([ord(character) for character in text])


def learn(memo: PrefixMemo, text: str, key: MemoKey = KEY) -> MemoNode:
    known = memo.match(key, NONE, text)
    node = known.node
    for piece in SPLITTER.split(text, known.end):
        node = memo.extend(key, node, piece, ids(piece))
    memo.settle(node)
    return node


def known_chars(memo: PrefixMemo, text: str, key: MemoKey = KEY) -> int:
    return memo.match(key, NONE, text).end


def memo_of(capacity_bytes: int = 10**6) -> PrefixMemo:
    return PrefixMemo(SPLITTER, BLOCK_SIZE, capacity_bytes)


def test_a_seen_prompt_is_known_entirely() -> None:
    """Nothing of it has to be tokenized again, and tokens and hashes are those of the whole."""
    memo = memo_of()
    text = "<s>system text<u>hello"
    learn(memo, text)
    match = memo.match(KEY, NONE, text)
    prompt = memo.prompt(match.node)
    assert match.end == len(text)
    assert prompt.token_ids.tolist() == ids(text).tolist()
    assert prompt.block_hashes == extend_chain(KEY.root, ids(text), BLOCK_SIZE)
    assert prompt.num_tokens == len(text)


def test_a_prompt_that_forks_is_known_up_to_the_fork() -> None:
    """The common pieces are known, also when another branch was used last."""
    memo = memo_of()
    learn(memo, "<s>system<u>one<a>")
    learn(memo, "<s>system<u>two<a>")
    assert known_chars(memo, "<s>system<u>one<a>more") == len("<s>system<u>one")
    assert known_chars(memo, "<s>system<u>three") == len("<s>system")
    assert known_chars(memo, "<s>system<u>one<a>") == len("<s>system<u>one<a>")


def test_a_piece_that_goes_on_is_not_taken_for_the_known_shorter_one() -> None:
    """`<u>one` was seen, `<u>one more` is a different piece although it starts the same."""
    memo = memo_of()
    learn(memo, "<s>x<u>one")
    assert known_chars(memo, "<s>x<u>one more") == len("<s>x")


def test_roots_share_nothing() -> None:
    """What one tenant sent is unknown below another tenant's root, short pieces included."""
    memo = memo_of()
    learn(memo, "<s>secret<u>")
    assert known_chars(memo, "<s>secret<u>", OTHER) == 0
    assert memo.short_piece(KEY, "<u>") is not None
    assert memo.short_piece(OTHER, "<u>") is None


def test_special_tokens_before_the_text_are_part_of_the_chain() -> None:
    """With and without them are different prefixes of the same root."""
    memo = memo_of()
    key = MemoKey(KEY.root, special_tokens=True)
    top = memo.match(key, as_token_ids([7]), "abc").node
    prompt = memo.prompt(memo.extend(key, top, "abc", ids("abc")))
    assert prompt.token_ids.tolist() == [7, *ids("abc").tolist()]
    assert prompt.block_hashes == extend_chain(KEY.root, prompt.token_ids, BLOCK_SIZE)
    assert memo.match(KEY, NONE, "abc").end == 0


def test_an_empty_prompt_has_no_tokens() -> None:
    """And no blocks."""
    memo = memo_of()
    prompt = memo.prompt(memo.match(KEY, NONE, "").node)
    assert (prompt.num_tokens, list(prompt.block_hashes)) == (0, [])


def test_the_least_recently_used_leaf_goes_first() -> None:
    """A common beginning outlives the branch that was not used for longest."""
    memo = memo_of()
    learn(memo, "<s>" + "s" * 200 + "<u>" + "a" * 200)
    learn(memo, "<s>" + "s" * 200 + "<u>" + "b" * 200)
    learn(memo, "<s>" + "s" * 200 + "<u>" + "a" * 200)
    small = PrefixMemo(SPLITTER, BLOCK_SIZE, memo.used_bytes + 1000)
    for letter in "abac":
        learn(small, "<s>" + "s" * 200 + "<u>" + letter * 200)
    assert known_chars(small, "<s>" + "s" * 200 + "<u>" + "a" * 200) == 406
    assert known_chars(small, "<s>" + "s" * 200 + "<u>" + "c" * 200) == 406
    assert known_chars(small, "<s>" + "s" * 200 + "<u>" + "b" * 200) == 203


def test_a_memo_without_room_still_renders() -> None:
    """Everything is forgotten at once, nothing is wrong."""
    memo = memo_of(0)
    node = learn(memo, "<s>one<u>two")
    assert memo.prompt(node).token_ids.tolist() == ids("<s>one<u>two").tolist()
    assert (len(memo), memo.used_bytes) == (0, 0)


def test_a_prefix_evicted_while_its_prompt_was_tokenized_is_put_back() -> None:
    """The prompt is complete, and so is the tree below it."""
    memo = memo_of(6000)
    learn(memo, "<s>first")
    known = memo.match(KEY, NONE, "<s>first<u>second")
    for i in range(20):
        learn(memo, f"<x>{i}" + "y" * 100)
    assert not known.node.attached
    node = memo.extend(KEY, known.node, "<u>second", ids("<u>second"))
    memo.settle(node)
    assert memo.prompt(node).token_ids.tolist() == ids("<s>first<u>second").tolist()
    assert known_chars(memo, "<s>first<u>second") == len("<s>first<u>second")


def test_the_memo_stays_within_its_bytes_and_estimates_them_honestly() -> None:
    """What it says it uses is what it uses, within a third."""
    learn(memo_of(), "<s>warm<u>up")
    capacity = 2_000_000
    tracemalloc.start()
    memo = PrefixMemo(SPLITTER, BLOCK_SIZE, capacity)
    before = tracemalloc.get_traced_memory()[0]
    for i in range(3000):
        learn(memo, f"<s>{i % 40}" + "s" * 300 + f"<u>question {i}<e>" + f"<a>{i}" * 3)
        assert memo.used_bytes <= capacity
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert capacity * 0.95 < memo.used_bytes
    assert 0.67 < used / memo.used_bytes < 1.33

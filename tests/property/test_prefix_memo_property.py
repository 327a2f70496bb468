"""With the memo, prompts are what they are without it, whatever was rendered or evicted before."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from engine_adapter.base import Prompt
from engine_adapter.prefix_memo import MemoKey, MemoMatch, PrefixMemo
from engine_adapter.rendering_tokenizer import PromptTokenizer
from prefix_store.base import BlockHash
from prefix_store.hashing import as_token_ids, extend_chain

MODEL = Path(__file__).parents[1] / "unit" / "engine_adapter" / "rendering_model"
LOADED = PromptTokenizer.from_backend((MODEL / "tokenizer.json").read_text())
# Cut so early that short texts have many pieces.
TOKENIZER = replace(LOADED, splitter=replace(LOADED.splitter, min_cut_chars=6))
ROOTS = (BlockHash(b"a" * 16), BlockHash(b"b" * 16))
BLOCK_SIZE = 4

CHUNKS = st.sampled_from(
    ["<|im_start|>", "<|im_end|>", "<|im_end|>\n", "<|sep|>", "<|im_", "end|>", "user\n", "Hello",
     " there", " I", "'m", " ", "  ", "\n", "\n\n", "a", "A", " b c d e f g h i j k", "1", "23 ",
     "é", "e\u0301", "\u0301", "你好", "。\n世", "\nThe next line\nand one more\n", "😀", "\u200d",
     ".", ", ", "<", "|>"]
)  # fmt: skip


@dataclass(frozen=True)
class Turn:
    """A text that starts like an earlier one, and how many others are rendered meanwhile."""

    root: BlockHash
    like: int
    """Which of the texts so far it starts like."""
    keep: float
    """How much of that text it shares."""
    more: list[str]
    pauses: bool
    """Whether another text is rendered between its look-up and its end."""


TURNS = st.builds(
    Turn,
    root=st.sampled_from(ROOTS),
    like=st.integers(0, 30),
    keep=st.sampled_from([0.0, 0.3, 0.5, 0.9, 1.0, 1.0, 1.0]),
    more=st.lists(CHUNKS, max_size=12),
    pauses=st.booleans(),
)


def expected(root: BlockHash, text: str) -> tuple[list[int], list[BlockHash]]:
    ids = TOKENIZER.backend.encode(text, add_special_tokens=False).ids
    return ids, extend_chain(root, as_token_ids(ids), BLOCK_SIZE)


def finish(memo: PrefixMemo, key: MemoKey, text: str, known: MemoMatch) -> Prompt:
    node = known.node
    pieces = list(TOKENIZER.splitter.split(text, known.end))
    for piece, token_ids in zip(pieces, TOKENIZER.encode(pieces), strict=True):
        node = memo.extend(key, node, piece, token_ids)
    prompt = memo.prompt(node)
    memo.settle(node)
    return prompt


def check(memo: PrefixMemo, capacity: int) -> None:
    """The books are right, and no prefix is older than what extends it."""
    nodes = list(memo._by_use)
    place = {node: index for index, node in enumerate(nodes)}
    assert memo.used_bytes == sum(node.size_bytes for node in nodes) <= capacity
    for node in nodes:
        assert node.attached
        if node.parent is not None:
            assert node.parent.children[node.piece] is node
            assert place[node.parent] > place[node]
        assert all(child in place for child in node.children.values())
        assert node.latest is None or node.latest in node.children.values()
    assert {top.node for top in memo._tops.values()} == {n for n in nodes if n.parent is None}


def test_the_tokenizer_of_these_tests_is_cut_in_long_pieces() -> None:
    """Otherwise the property below would hold for want of cuts."""
    assert TOKENIZER.splitter.cuts_long_pieces
    assert len(list(TOKENIZER.splitter.split("one two three four five six"))) > 2


@settings(max_examples=300, deadline=None)
@given(turns=st.lists(TURNS, max_size=25), capacity=st.sampled_from([0, 4_000, 20_000, 10**7]))
def test_prompts_with_the_memo_equal_prompts_without_it(turns: list[Turn], capacity: int) -> None:
    """Token for token and hash for hash, for texts that extend and fork one another."""
    memo = PrefixMemo(TOKENIZER.splitter, BLOCK_SIZE, capacity)
    no_tokens = as_token_ids([])
    texts = ["<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"]
    pending: list[tuple[MemoKey, str, MemoMatch]] = []
    for turn in turns:
        like = texts[turn.like % len(texts)]
        text = like[: int(len(like) * turn.keep)] + "".join(turn.more)
        texts.append(text)
        key = MemoKey(turn.root, special_tokens=False)
        pending.append((key, text, memo.match(key, no_tokens, text)))
        if turn.pauses and len(pending) < 4:
            continue
        while pending:
            key, text, known = pending.pop()
            prompt = finish(memo, key, text, known)
            ids, chain = expected(key.root, text)
            assert prompt.token_ids.tolist() == ids
            assert list(prompt.block_hashes) == chain
            assert prompt.num_tokens == len(ids)
            check(memo, capacity)

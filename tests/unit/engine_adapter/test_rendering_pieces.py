"""Texts are cut only where tokenizing the pieces is exact."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine_adapter.rendering_pieces import _CUT, PieceSplitter, splitter_of
from engine_adapter.rendering_tokenizer import PromptTokenizer

MODEL = Path(__file__).parent / "rendering_model"


def backend(**changes: Any) -> dict[str, Any]:
    config: dict[str, Any] = msgspec.json.decode((MODEL / "tokenizer.json").read_bytes())
    return config | changes


def token(content: str, **flags: bool) -> dict[str, Any]:
    usual = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": 0, "special": True, "content": content, **usual, **flags}


def pieces(splitter: PieceSplitter, text: str) -> list[str]:
    return list(splitter.split(text))


def test_a_piece_starts_at_each_added_token() -> None:
    """And holds the text up to the next one."""
    splitter = splitter_of(backend())
    text = "before<|im_start|>user\nHi<|im_end|>\n<|im_start|><|im_end|>"
    assert pieces(splitter, text) == [
        "before", "<|im_start|>user\nHi", "<|im_end|>\n", "<|im_start|>", "<|im_end|>",
    ]  # fmt: skip
    assert pieces(splitter, "") == []


@pytest.mark.parametrize(
    ("added", "boundaries"),
    [
        ([token("<a>"), token("<b>")], ["<a>", "<b>"]),
        ([token("<a>"), token("<a>\n")], []),
        ([token("<a>"), token("x<a>y")], ["x<a>y"]),
        ([token("<a>"), token("b<")], ["b<"]),
        ([token("aba")], []),
        ([token("<a>", normalized=True), token("<b>")], ["<b>"]),
        ([token("<a>", lstrip=True), token("<b>", rstrip=True), token("<c>")], ["<c>"]),
        ([token("<a>", single_word=True), token("<b>")], []),
        ([token("< a>")], []),
        ([], []),
    ],
)
def test_added_tokens_that_depend_on_their_surroundings_are_no_boundaries(
    added: list[dict[str, Any]], boundaries: list[str]
) -> None:
    """Contained, overlapping, space-eating, word-bound and normalized ones."""
    splitter = splitter_of(backend(added_tokens=added))
    found = [
        entry["content"]
        for entry in added
        if splitter.boundary and splitter.boundary.fullmatch(entry["content"])
    ]
    assert found == boundaries


def test_long_pieces_are_cut_between_words_and_after_lines() -> None:
    """At the first safe place after the minimum; equal prefixes are cut equally."""
    splitter = replace(splitter_of(backend()), min_cut_chars=10)
    assert pieces(splitter, "some words of some length")[:1] == ["some words"]
    assert pieces(splitter, "12345678901\nnext")[:1] == ["12345678901\n"]
    assert pieces(splitter, "12345678901\n\nnext") == ["12345678901\n\nnext"]
    assert pieces(splitter, "some words  of") == ["some words  of"]
    assert pieces(splitter, "some words 1") == ["some words 1"]
    long = pieces(splitter, "some words of some length and then more of them")
    longer = pieces(splitter, "some words of some length and then more of them at the end")
    assert longer[: len(long) - 1] == long[:-1]


def test_searching_in_windows_finds_the_same_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """As looking for the next added token in all of the text, then for a cut before it."""
    monkeypatch.setattr("engine_adapter.rendering_pieces._WINDOW_CHARS", 7)
    splitter = replace(splitter_of(backend()), min_cut_chars=20)
    chooser = random.Random(5)
    words = ["<|im_start|>", "<|im_end|>", "<|im_", " word", "x", "\nline", "\n\n", "你好", "12345"]
    for _ in range(300):
        text = "".join(chooser.choices(words, [1, 1, 1, 3, 2, 3, 1, 5, 5], k=60))
        for start in range(0, len(text), 11):
            assert splitter.boundary is not None
            found = splitter.boundary.search(text, start + 1)
            end = found.start() if found else len(text)
            cut = _CUT.search(text, start + 20, end) if end > start + 20 else None
            assert splitter.end(text, start) == (cut.start() if cut else end)


LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def split_by(pattern: str) -> dict[str, Any]:
    return {
        "type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "cuts"),
    [
        ({}, True),
        ({"normalizer": {"type": "NFC"}}, True),
        ({"normalizer": {"type": "Prepend", "prepend": "_"}}, False),
        ({"pre_tokenizer": None}, False),
        ({"pre_tokenizer": {"type": "Metaspace", "replacement": "_"}}, False),
        ({"pre_tokenizer": BYTES}, False),
        ({"pre_tokenizer": {**BYTES, "use_regex": True, "add_prefix_space": True}}, False),
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split_by(LLAMA3), BYTES]}}, True),
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split_by("x"), BYTES]}}, False),
        ({"added_tokens": [token("<a>"), token("two words", normalized=True)]}, False),
        ({"added_tokens": [token("<a>"), token("<mask>", lstrip=True)]}, False),
        ({"added_tokens": [token("user")]}, False),
    ],
)
def test_long_pieces_are_cut_only_for_tokenizers_that_were_reasoned_through(
    change: dict[str, Any], cuts: bool
) -> None:
    """Byte-level tokenizers with a known pattern and nothing that reaches over a cut."""
    assert splitter_of(backend(**change)).cuts_long_pieces is cuts


@pytest.mark.parametrize(
    "pre_tokenizer",
    [
        {"type": "Sequence", "pretokenizers": [split_by(LLAMA3), BYTES]},
        {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True}, {**BYTES, "use_regex": True},
            ],
        },
    ],
)  # fmt: skip
def test_the_known_tokenizers_pass_their_self_test(pre_tokenizer: dict[str, Any]) -> None:
    """With every kind of cut in its samples."""
    source = msgspec.json.encode(backend(pre_tokenizer=pre_tokenizer)).decode()
    tokenizer = PromptTokenizer.from_backend(source)
    assert tokenizer.splitter.cuts_long_pieces


def test_a_splitter_that_fails_the_self_test_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole prompts are tokenized then: exact, but known only when they are equal."""
    wrong = PieceSplitter(boundary=re.compile("l"), max_boundary_chars=1)
    monkeypatch.setattr("engine_adapter.rendering_tokenizer.splitter_of", lambda _: wrong)
    tokenizer = PromptTokenizer.from_backend((MODEL / "tokenizer.json").read_text())
    assert pieces(tokenizer.splitter, "<|im_start|>hello") == ["<|im_start|>hello"]
    assert tokenizer.splitter.ends_at("<|im_start|>hello", 0, 17)
    assert not tokenizer.splitter.ends_at("<|im_start|>hello", 0, 12)


def test_unsafe_cuts_are_given_up_before_all_cuts_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """If only the cuts within long pieces fail, pieces at added tokens remain."""
    good = PromptTokenizer.from_backend((MODEL / "tokenizer.json").read_text()).splitter
    monkeypatch.setattr("engine_adapter.rendering_pieces._CUT", re.compile(r"(?<=e)(?=r)"))
    tokenizer = PromptTokenizer.from_backend((MODEL / "tokenizer.json").read_text())
    assert tokenizer.splitter == replace(good, cuts_long_pieces=False)

"""The tokenizer of a model, applied piece by piece where that is exact."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from tokenizers import Tokenizer

from engine_adapter.base import RenderingError
from engine_adapter.rendering_pieces import PieceSplitter, splitter_of
from prefix_store.hashing import TokenIds, as_token_ids

_TEXTS_AT_A_TIME = 8

_SAMPLE_CUT_CHARS = 16
"""Pieces of the self-test are cut so short that its samples meet every kind of cut."""

_SAMPLES = (
    "", " ", "\n", "\n\n", "a", " a", "Hello there, how are you today? I'm fine, aren't we all?",
    "  two  spaces   three\t\ttabs \n \n\n lines\r\nwindows\n", "line one\nline two\n\nline four\n",
    "Numbers 12345 and 3.14159, dates 2031-01-02, \u0661\u0662\u0663, x2 y3\n4 five",
    "Gr\u00f6\u00dfe na\u00efve cafe\u0301 e\u0301\u0323",
    "\u4f60\u597d\u3002\n\u4e16\u754c \u304c\u304b\u3099",
    "\ud55c\uad6d\uc5b4\n\ud55c \u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd",
    "emoji \U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 flags \U0001f1e9\U0001f1ea",
    "zero\u200bwidth a\u0300\u0301b no\u00a0break \u2028 \u3000 wide",
    "def f(x):\n    return {'a': [1, 2], \"b\": None}  # don't\n\n\nclass A:\n\tpass\n",
    "<div class=\"x\">a &lt; b</div> <| not special |> <s> </s> [INST] ### \u2581 \u0120",
    "The quick brown fox jumps over the lazy dog and then it runs away from here to there again "
    "because We'll see what THEY'RE doing in ALL CAPS or CamelCaseWords and snake_case_words too",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class PromptTokenizer:
    """Turns pieces of text into token ids. Its methods may run in several threads at once."""

    backend: Tokenizer
    splitter: PieceSplitter
    added_before: TokenIds | None
    """The special tokens put before each text if asked for; None: they cannot be told apart."""

    @classmethod
    def from_backend(cls, source: str) -> PromptTokenizer:
        """From the `tokenizers` backend as JSON; tests itself (some 10 ms) to know where to cut."""
        backend = Tokenizer.from_str(source)
        backend.no_truncation()
        backend.no_padding()
        splitter = splitter_of(json.loads(source))
        for candidate in (splitter, replace(splitter, cuts_long_pieces=False), PieceSplitter()):
            if _is_exact(backend, candidate):
                break
        return cls(backend, candidate, _added_before(backend))

    def encode(self, texts: Sequence[str]) -> list[TokenIds]:
        """Token ids of each text, without special tokens around it. Releases the GIL."""
        done: list[TokenIds] = []
        try:
            # Some at a time: the GIL is held while their tokens become arrays.
            for i in range(0, len(texts), _TEXTS_AT_A_TIME):
                batch = list(texts[i : i + _TEXTS_AT_A_TIME])
                encoded = self.backend.encode_batch_fast(batch, add_special_tokens=False)
                done.extend(as_token_ids(one.ids) for one in encoded)
        except (TypeError, UnicodeEncodeError) as e:  # lone surrogates
            raise RenderingError("the prompt is not valid Unicode text") from e
        return done

    def encode_with_special_tokens(self, text: str) -> TokenIds:
        """Token ids of a whole text with the special tokens around it."""
        try:
            return as_token_ids(self.backend.encode(text, add_special_tokens=True).ids)
        except (TypeError, UnicodeEncodeError) as e:
            raise RenderingError("the prompt is not valid Unicode text") from e


def _is_exact(backend: Tokenizer, splitter: PieceSplitter) -> bool:
    """Whether tokenizing pieces gives the tokens of the whole, on samples around added tokens."""
    if splitter.boundary is None:
        return True
    short = replace(splitter, min_cut_chars=_SAMPLE_CUT_CHARS)
    added = [token.content for token in backend.get_added_tokens_decoder().values()]
    marks = [content for content in added if splitter.boundary.fullmatch(content)][:3]
    wholes = list(_SAMPLES)
    for mark in marks:
        wholes += [mark + sample + mark for sample in _SAMPLES]
        wholes += [sample + mark + "x" + sample for sample in _SAMPLES]
        wholes.append(mark.join(_SAMPLES))
    wholes.append("".join(_SAMPLES))
    for whole in wholes:
        ids = backend.encode(whole, add_special_tokens=False).ids
        pieces = backend.encode_batch(list(short.split(whole)), add_special_tokens=False)
        if ids != [token for piece in pieces for token in piece.ids]:
            return False
    return True


def _added_before(backend: Tokenizer) -> TokenIds | None:
    """The special tokens before a text, when they are always the same and none comes after it."""
    before = backend.encode("", add_special_tokens=True).ids
    for sample in _SAMPLES:
        plain = backend.encode(sample, add_special_tokens=False).ids
        if backend.encode(sample, add_special_tokens=True).ids != before + plain:
            return None
    return as_token_ids(np.array(before, dtype=np.int32))

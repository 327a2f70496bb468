"""Where a rendered text may be cut so that its pieces can be tokenized one by one, exactly.

Tokenizers cut a text at added tokens (`<|im_start|>`) before they do anything else, so what stands
between two of them is tokenized on its own. A piece here starts with such a token and runs up to
the next one. Long pieces are cut further where the pre-tokenizer cuts anyway, whatever stands
around. Both depend only on the text before and right at the cut: equal prefixes are cut equally.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

MIN_CUT_CHARS = 4096
"""A piece is cut at the first safe place after so many characters."""

_LETTER = r"A-Za-z\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fff\uac00-\ud7a3"

_CUT = re.compile(rf"(?<=[A-Za-z])(?= [A-Za-z])|(?<=\S\n)(?=[{_LETTER}])")
"""Between a letter and a single space with a letter; after a single line feed that ends a line of
text and stands before a letter. Every pattern below starts a new word at both, and neither side can
tell what is on the other: the patterns look around only in runs of white space, and there is at
most one such character on either side."""

_CUT_LOOKAHEAD = 2
_WINDOW_CHARS = 4096

_GPT2_TAIL = r"|\s+(?!\S)|\s+"
_SAFE_PATTERNS = frozenset(
    [r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+" + _GPT2_TAIL]
    + [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+" + _GPT2_TAIL
        for digits in (r"\p{N}", r"\p{N}{1,3}")
    ]
)  # fmt: skip
"""Pre-tokenizer patterns of GPT-2, Qwen and Llama 3, for which the cuts were reasoned through."""


@dataclass(frozen=True, slots=True)
class PieceSplitter:
    """Cuts texts into pieces. Made by `splitter_of`; without `boundary` a text is one piece."""

    boundary: re.Pattern[str] | None = None
    """Matches the added tokens at which a piece starts."""
    cuts_long_pieces: bool = False
    min_cut_chars: int = MIN_CUT_CHARS
    max_boundary_chars: int = 0
    """Length of the longest of these tokens."""

    def end(self, text: str, start: int) -> int:
        """Where the piece of `text` that starts at `start` ends."""
        if self.boundary is None:
            return len(text)
        low, high = start + 1, start + self.min_cut_chars
        if not self.cuts_long_pieces:
            high = len(text)
        while (
            True
        ):  # in windows, so that what lies behind the piece is not searched again and again
            found = self.boundary.search(text, low, high + self.max_boundary_chars)
            end = found.start() if found else len(text)
            if low >= start + self.min_cut_chars and self.cuts_long_pieces:
                cut = _CUT.search(text, low, min(end, high + _CUT_LOOKAHEAD))
                if cut and cut.start() < min(end, high):
                    return cut.start()
            if end < high or high >= len(text):
                return end
            low, high = high, high + _WINDOW_CHARS

    def ends_at(self, text: str, start: int, end: int) -> bool:
        """Whether the piece at `start` ends at `end`, if `text[start:end]` is a piece elsewhere."""
        if end == len(text):
            return True
        if self.boundary is None:
            return False
        if self.boundary.match(text, end):
            return True
        return (
            self.cuts_long_pieces
            and end - start >= self.min_cut_chars
            and _CUT.match(text, end) is not None
        )

    def split(self, text: str, start: int = 0) -> Iterator[str]:
        """The pieces of `text` from the piece boundary `start` on."""
        while start < len(text):
            end = self.end(text, start)
            yield text[start:end]
            start = end


def splitter_of(backend: dict[str, Any]) -> PieceSplitter:
    """The splitter that the `tokenizers` backend (its JSON) allows. Test it before use."""
    added = backend.get("added_tokens") or []
    if any(token["single_word"] for token in added):
        return PieceSplitter()  # whether such a token matches depends on its neighbours
    boundaries = _boundaries(added)
    if not boundaries:
        return PieceSplitter()
    return PieceSplitter(
        boundary=_any_of(boundaries),
        cuts_long_pieces=_allows_cuts(backend, added, boundaries),
        max_boundary_chars=max(map(len, boundaries)),
    )


def _boundaries(added: Sequence[dict[str, Any]]) -> list[str]:
    """The added tokens whose match depends on nothing but their own characters.

    Left out: tokens matched only after normalization, tokens that reach for the white space around
    them, and tokens that another one contains or can overlap (the leftmost, longest match wins).
    """
    first_pass = [token for token in added if not token["normalized"] and token["content"]]
    contents = {token["content"] for token in first_pass}
    endings = {content[i:] for content in contents for i in range(1, len(content))}
    return [
        content
        for token in first_pass
        if not (token["lstrip"] or token["rstrip"])
        and (content := token["content"])
        and not re.search(r"\s", content)
        and not any(content[:n] in endings for n in range(1, len(content) + 1))
        and not any(content in other for other in contents if other != content)
    ]


def _allows_cuts(
    backend: dict[str, Any], added: Iterable[dict[str, Any]], boundaries: Iterable[str]
) -> bool:
    model, normalizer = backend["model"], backend.get("normalizer")
    return (
        model.get("type") == "BPE"
        and not model.get("dropout")
        and (normalizer is None or normalizer.get("type") == "NFC")
        and _is_safe_pre_tokenizer(backend.get("pre_tokenizer"))
        and not any(re.match(rf"[{_LETTER}]", boundary) for boundary in boundaries)
        and not any(
            token["lstrip"] or token["rstrip"] or re.search(r"\S\s|\s\S", token["content"])
            for token in added
        )
    )


def _is_safe_pre_tokenizer(config: dict[str, Any] | None) -> bool:
    """Whether it is byte-level behind one of the patterns known to be safe."""
    if config is None:
        return False
    steps = config["pretokenizers"] if config["type"] == "Sequence" else [config]
    *before, last = steps
    if last["type"] != "ByteLevel" or last["add_prefix_space"]:
        return False
    has_pattern = bool(last.get("use_regex", True))
    for step in before:
        if step["type"] == "Split":
            pattern = step["pattern"].get("Regex")
            if pattern not in _SAFE_PATTERNS or step["behavior"] != "Isolated" or step["invert"]:
                return False
            has_pattern = True
        elif step["type"] != "Digits":
            return False
    return has_pattern


def _any_of(words: Iterable[str]) -> re.Pattern[str]:
    """A pattern for any of `words`; common beginnings are written once, which makes it several
    times faster than a plain alternation on texts full of `<`."""
    tree: dict[str, Any] = {}
    for word in words:
        node = tree
        for character in word:
            node = node.setdefault(character, {})
        node[""] = {}
    return re.compile(_alternation(tree))


def _alternation(tree: dict[str, Any]) -> str:
    branches = []
    for character, rest in tree.items():
        branches.append(re.escape(character) + (_alternation(rest) if rest else ""))
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"

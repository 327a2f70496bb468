"""The prompts of bench.overhead: 64 bytes, 32 KB seen before, 32 KB with a new question."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from bench.lean_client import chat_request

SEED = 20261130
SMALL_BYTES = 64
LARGE_BYTES = 32 * 1024

_WORDS = (
    "the customer asks about an order that was sent last week and we answer in plain words "
    "because every reply should be short polite complete and easy to check when somebody reads "
    "it again later so name the date the place the price and the next step then stop writing"
)
_NUMBER = b"########"
"""Stands for the number of a question, so that every request has the same length."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One kind of prompt."""

    name: str
    system: str | None
    user: str

    def requests(self, model: str) -> Callable[[str], bytes]:
        """Makes requests; each call is the next question where the shape asks new ones."""
        numbers = count()
        templates: dict[str, bytes] = {}

        def request(url: str) -> bytes:
            if url not in templates:
                templates[url] = chat_request(url, model, self.system, self.user)
            return templates[url].replace(_NUMBER, b"%08d" % next(numbers))

        return request


def shapes() -> tuple[Shape, ...]:
    """The three shapes."""
    system = _text(LARGE_BYTES)
    small = _text(SMALL_BYTES)
    return (
        Shape("64 bytes", None, small),
        Shape("32 KB, seen", system, "And what is the next step?"),
        Shape("32 KB, new question", system, f"And what is the next step in case {'#' * 8}?"),
    )


def _text(num_bytes: int) -> str:
    chooser, words = random.Random(SEED), _WORDS.split()
    text = " ".join(chooser.choice(words) for _ in range(num_bytes // 2))
    return text[:num_bytes]

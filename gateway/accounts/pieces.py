"""Work that can be done piece by piece: a generator that returns its result."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")


def at_once(work: Generator[None, None, T]) -> T:
    """All pieces, one after another."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result

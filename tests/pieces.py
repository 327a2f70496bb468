"""Work that is done piece by piece, done at once."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")


def at_once(work: Generator[None, None, T]) -> T:
    """The result of a generator."""
    results: list[T] = []

    def drained() -> Generator[None, None, None]:
        results.append((yield from work))

    for _ in drained():
        pass
    return results[0]

"""How much KV memory of an engine is free, between two looks at its gauge."""

from __future__ import annotations

_MIN_USED = 0.02
"""Shares of use below this are too coarse to learn from."""
_GAIN = 0.2


class KvRoom:
    """The gauge is seconds old, and a busy fleet places many requests in a second: all of them
    would go to where memory was free then. So what was sent and what ended since is counted, in
    tokens; how many of them fill the memory is learned from the gauge itself."""

    def __init__(self) -> None:
        self._polled_free: float | None = None
        self._polled_tokens = 0
        self._capacity_tokens: float | None = None

    def polled(self, free: float | None, tokens: int) -> None:
        """The gauge says `free`, 0 to 1, while our requests there have `tokens` in all; None where
        it does not say."""
        self._polled_free, self._polled_tokens = free, tokens
        if free is None or tokens <= 0 or 1.0 - free < _MIN_USED:
            return
        capacity = tokens / (1.0 - free)
        if self._capacity_tokens is None:
            self._capacity_tokens = capacity
        else:
            self._capacity_tokens += _GAIN * (capacity - self._capacity_tokens)

    def free(self, tokens: int) -> float | None:
        """Now that our requests there have `tokens`; None where it is not known."""
        if self._polled_free is None or self._capacity_tokens is None:
            return self._polled_free
        more = (tokens - self._polled_tokens) / self._capacity_tokens
        return min(1.0, max(0.0, self._polled_free - more))

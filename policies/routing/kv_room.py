"""How much KV memory of an engine is free, between two looks at its gauge."""

from __future__ import annotations

from policies.routing.engine_load import EngineLoad

_MIN_USED = 0.02
"""Shares of use below this are too coarse to learn from."""
_GAIN = 0.2


class KvRoom:
    """The gauge is seconds old, and a busy fleet places many requests in a second: all of them
    would go to where memory was free then. So what was sent and what ended since is counted, in
    tokens.

    Prompts that begin alike share memory, so counted tokens fill less of it than they say: by how
    much is learned at every look. Where the engine does not say how much it has, that is learned
    too."""

    def __init__(self) -> None:
        self._free: float | None = None
        """As the gauge said."""
        self._counted = 0
        """All our tokens, when it said so."""
        self._capacity: float | None = None
        """Counted tokens that fill the memory."""
        self._is_said = False
        """The engine said its capacity."""
        self._others = 0.0
        """Share of the memory that requests of others held at the last look."""

    def polled(self, load: EngineLoad, counted: int, started: int) -> None:
        """At this look our requests had `counted` tokens in all, `started` of them in requests that
        have a first token: the others' are not all allocated yet."""
        self._free, self._counted = load.kv_free, counted
        self._is_said = load.kv_tokens is not None
        used = 0.0 if load.kv_free is None else 1.0 - load.kv_free
        if load.kv_tokens is not None:
            # With nothing in use there is nothing to share: forgotten step by step.
            seen = max(load.kv_tokens, started / used if used >= _MIN_USED else 0.0)
            self._learn(float(seen))
        elif used >= _MIN_USED and counted > 0:
            self._learn(counted / used)
        self._others = max(0.0, used - self.share(counted))

    def forget(self) -> None:
        """The gauge is too old to say anything."""
        self._free = None
        self._counted = 0

    def free(self, counted: int) -> float | None:
        """Share that is free now that our requests have `counted` tokens; None where it is not
        known."""
        if self._free is None or self._capacity is None:
            return self._free
        return min(1.0, max(0.0, self._free - (counted - self._counted) / self._capacity))

    def missing_tokens(self, counted: int) -> int:
        """By so many, requests with `counted` tokens do not fit, once all of them are allocated; 0
        where the engine does not say how much it has."""
        if self._free is None or self._capacity is None or not self._is_said:
            return 0
        return max(0, round(counted - self._capacity * (1.0 - self._others)))

    def share(self, tokens: int) -> float:
        """Of the memory, that so many tokens fill."""
        return tokens / self._capacity if self._capacity else 0.0

    def _learn(self, capacity: float) -> None:
        if self._capacity is None:
            self._capacity = capacity
        else:
            self._capacity += _GAIN * (capacity - self._capacity)

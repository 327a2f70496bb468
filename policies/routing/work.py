"""What a request asks of an engine, what that is expected to take, and what it took."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Work:
    """What a request asks of an engine, in tokens of its prompt."""

    uncached_tokens: int
    """To be computed; at least one for every prompt that is known."""
    stored_tokens: int
    """To be loaded from the store."""
    context_tokens: int
    """Reused in all, stored ones included: what the computed ones look back on."""

    @property
    def num_tokens(self) -> int:
        """Of the whole prompt."""
        return self.uncached_tokens + self.context_tokens

    def without(self, tokens: int) -> Work:
        """So many of the tokens in the engine's own cache, or all of them, are gone when it is
        computed."""
        lost = min(tokens, self.context_tokens - self.stored_tokens)
        if lost <= 0:
            return self
        return Work(self.uncached_tokens + lost, self.stored_tokens, self.context_tokens - lost)


@dataclass(frozen=True, slots=True)
class Expected:
    """Parts of the time to first token."""

    queue_s: float
    load_s: float
    prefill_s: float

    @property
    def ttft_s(self) -> float:
        return self.queue_s + self.load_s + self.prefill_s


@dataclass(frozen=True, slots=True)
class Observed:
    """What a finished request really took; None where nobody said."""

    work: Work
    """As delivered, by the engine's own report."""
    queue_s: float | None
    load_s: float
    prefill_s: float | None
    """From its scheduling to the first token, loads left out."""
    ttft_s: float | None
    """From sending to the first token."""

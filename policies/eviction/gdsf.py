"""Greedy-Dual-Size-Frequency: what is cheap to compute again, per byte, goes first."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from policies.base import Settings
from policies.eviction.aged_queue import AgedQueue
from policies.eviction.base import B, EvictionQueue


class GdsfQueue(AgedQueue[B]):
    """A block's key is uses x cost / bytes plus the queue's age at the last use. The cost is that
    of its tokens, which attend to all tokens before them."""

    def __init__(self, attention_tokens: int) -> None:
        super().__init__()
        self._attention_tokens = attention_tokens

    def value(self, block: B, uses: int) -> float:
        # Blocks of a prompt are of one size, so its depth says how many tokens stand before.
        tokens = block.num_tokens
        cost = tokens * (1 + block.depth * tokens / self._attention_tokens)
        return uses * cost / max(1, block.num_bytes)


class GdsfEviction(Settings):
    """Greedy-Dual-Size-Frequency (GDSF) with the prefill's cost. Source: L. Cherkasova, "Improving
    WWW proxies performance with Greedy-Dual-Size-Frequency caching policy", HP Labs technical
    report 98-69R1, 1998. Good where models with blocks of different sizes share a tier and on chat;
    loses to LRU on agents. Of blocks used alike the cheaper, so the shallower goes first."""

    kind: Literal["gdsf"] = "gdsf"
    attention_tokens: int = Field(default=8192, ge=1)
    """With so many tokens before it a token costs twice as much as the first one of a prompt."""

    def queue(self) -> EvictionQueue[Any]:
        return GdsfQueue[Any](self.attention_tokens)

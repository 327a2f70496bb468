"""What LRU would have done with the same traffic, and whether it would have done better."""

from __future__ import annotations

from collections import deque
from typing import Protocol

TOLERANCE = 0.002
"""Share of the requested tokens that the predictions may cost before LRU rules ..."""

GRACE_PROMPTS = 6.0
"""... and so many average prompts, since a hit or a miss comes by whole prompts."""

LESSONS = 4.0
"""Requested tokens, in capacities of the tier, that the predictions are learned from first."""

TRIAL_PROMPTS = 2.0
"""So many may be lost again in the next trial, once there is room for it."""

PROMPTS_AVERAGED = 256

MEMORY = 100.0
"""Requested tokens, in capacities of the tier, after which the past counts half."""

STEP = 0.02
"""The past is discounted in steps of this share."""


class Stacked(Protocol):
    """Blocks that one request was the last to use."""

    stacked: int
    """Tokens of it that LRU would hold: its heads."""
    listed: bool
    """Whether the guard has it in its list."""


class LruGuard:
    """An account of hits against LRU's, and who rules.

    LRU needs no shadow cache to be known: in tail-first order it holds exactly the tokens used last
    that fit (its stack property, Mattson 1970). So a list of the runs of blocks by their last use,
    cut off at the capacity, tells for each reuse whether LRU would have had it.

    The account is discounted with the requested tokens; it is never above zero, so yesterday's
    gains do not pay for today's losses. When it is overdrawn LRU rules. What may be drawn grows
    with the requested tokens, so the predictions are tried again from time to time, at a cost of
    TOLERANCE of the requested tokens in the long run."""

    def __init__(self) -> None:
        self._stack: deque[Stacked] = deque()
        self._stacked = 0
        self._swept = 0
        self._balance = 0.0
        self._requested = 0.0
        self._lessons = 0
        self._prompts = 0
        self._prompt_tokens = 0.0
        self._since_discount = 0
        self.capacity = 0
        """Tokens that fit into the tier; 0 as long as it was never full."""
        self.lru_rules = False

    def grew(self, run: Stacked, tokens: int) -> None:
        """A request has used more tokens of a run; runs come in the order of their requests."""
        run.stacked += tokens
        self._stacked += tokens
        if not run.listed:
            run.listed = True
            self._stack.append(run)
            self._sweep()
        while self._stacked > self.capacity > 0:
            oldest = self._stack[0]
            gone = min(oldest.stacked, self._stacked - self.capacity)
            oldest.stacked -= gone
            self._stacked -= gone
            if not oldest.stacked:
                oldest.listed = False
                self._stack.popleft()

    def _sweep(self) -> None:
        """Drop runs of which nothing is left."""
        if len(self._stack) <= 2 * self._swept + 64:
            return
        newest = self._stack[-1]
        kept = deque[Stacked]()
        for run in self._stack:
            run.listed = run.stacked > 0 or run is newest
            if run.listed:
                kept.append(run)
        self._stack = kept
        self._swept = len(kept)

    def shrank(self, run: Stacked, tokens: int) -> int:
        """Tokens of a run were used again or are forgotten; returns how many LRU had."""
        had = min(tokens, run.stacked)
        run.stacked -= had
        self._stacked -= had
        return had

    def settle(self, ours: int, lru: int) -> None:
        """So many tokens were found, and LRU would have found so many."""
        self._balance = min(0.0, self._balance + ours - lru)

    def prompt(self, tokens: int) -> None:
        """A request with so many tokens in its prompt came."""
        self._prompts = min(self._prompts + 1, PROMPTS_AVERAGED)
        self._prompt_tokens += (tokens - self._prompt_tokens) / self._prompts

    def requested(self, tokens: int) -> None:
        """Tokens were asked for, found or not."""
        self._requested += tokens
        self._lessons += tokens
        self._since_discount += tokens
        if self._since_discount > STEP * MEMORY * self.capacity > 0:
            share = 0.5 ** (self._since_discount / (MEMORY * self.capacity))
            self._since_discount = 0
            self._balance *= share
            self._requested *= share
        if self._lessons < LESSONS * self.capacity:
            self.lru_rules = self.capacity > 0
            return
        limit = -TOLERANCE * self._requested - GRACE_PROMPTS * self._prompt_tokens
        if self.lru_rules:
            limit += TRIAL_PROMPTS * self._prompt_tokens
        self.lru_rules = self._balance < limit

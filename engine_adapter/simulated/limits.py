"""Bounds and counters of a simulated engine's (engine_adapter.simulated) scheduler."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Tokens are those of the model, but for the block size."""

    num_blocks: int
    block_size: int = 16
    """Tokens on the wire."""
    tokens_per_wire_token: int = 1
    max_batched_tokens: int = 2048
    max_sequences: int = 256
    by_priority: bool = False
    """Waiting sequences by priority and then arrival, instead of by arrival."""
    chunk_s: float = 0.0
    """Streams need a sign of life so often, of the simulated clock; 0: at every token."""
    together_s: float = 0.2
    """Longest row of steps that is planned together: gauges stand still meanwhile."""


@dataclass(slots=True)
class SchedulerCounters:
    """Counts since the start; tokens are those on the wire."""

    queried_tokens: int = 0
    hit_tokens: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    finished: int = 0
    aborted: int = 0
    busy_s: float = 0.0

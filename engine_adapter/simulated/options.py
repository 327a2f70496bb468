"""What a simulated engine (engine_adapter.simulated) is like."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from engine_adapter.event_subscriber import binds
from engine_adapter.simulated.limits import SchedulerLimits
from engine_adapter.simulated.timing import StepTiming

MAX_SILENCE_S = 0.2
"""Real time after which gauges show what was done meanwhile, at the latest."""


class OptionsError(ValueError):
    """Options that no engine could have; the message says what to change."""


@dataclass(frozen=True, slots=True)
class SimulationOptions:
    """One replica. Counts of tokens are those of the model, but for block_size and max_model_len,
    which are on the wire."""

    model: str
    adapters: tuple[str, ...] = ()
    block_size: int = 16
    kv_tokens: int = 400_000
    """What fits in its memory beside the weights."""
    max_model_len: int = 32_768
    max_batched_tokens: int = 2048
    max_sequences: int = 256
    tokens_per_wire_token: int = 1
    """A token on the wire stands for so many of the model's, in time and in memory."""
    by_priority: bool = False
    timing: StepTiming = field(default_factory=StepTiming)
    speed: float = 1.0
    """Seconds of the simulated clock in a real second."""
    seed: int = 0
    min_chunk_s: float = 0.0
    """Real seconds between two pieces of a stream; 0: a piece for every token."""
    answer_tokens: int = 64
    """Mean length of answers that end by themselves, on the wire."""
    events: str | None = None
    """Endpoint of the KV events; None: there are none."""
    replay: str | None = None
    replay_bytes: int = 64 * 1024**2
    """vLLM's replay buffer is bounded by its 10,000 batches only."""
    model_path: Path | None = None
    """Directory of a model whose tokenizer and chat template are used."""

    def __post_init__(self) -> None:
        if (self.events is None) != (self.replay is None):
            raise OptionsError("give both endpoints, events and replay, or none")
        for endpoint in (self.events, self.replay):
            if endpoint is not None and not binds(endpoint):
                raise OptionsError(
                    f"{endpoint}: a simulated engine only binds; give ipc://PATH or tcp://*:PORT"
                )
        if self.speed <= 0 or self.block_size < 1 or self.tokens_per_wire_token < 1:
            raise OptionsError("speed, block size and tokens per wire token must be positive")
        if self.limits.num_blocks * self.block_size < self.max_model_len:
            raise OptionsError(
                f"{self.kv_tokens} tokens of KV are too few for one sequence of "
                f"{self.max_model_len * self.tokens_per_wire_token}: lower max-model-len"
            )

    @property
    def limits(self) -> SchedulerLimits:
        return SchedulerLimits(
            num_blocks=self.kv_tokens // (self.block_size * self.tokens_per_wire_token),
            block_size=self.block_size,
            tokens_per_wire_token=self.tokens_per_wire_token,
            max_batched_tokens=self.max_batched_tokens,
            max_sequences=self.max_sequences,
            by_priority=self.by_priority,
            chunk_s=self.min_chunk_s * self.speed,
            together_s=MAX_SILENCE_S * self.speed,
        )

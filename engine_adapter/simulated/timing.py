"""How long the steps of a simulated engine take (engine_adapter.simulated).

    prefill step = base + prefill_token * tokens + attention_pair * pairs of positions + decodes'
    decodes'     = decode * sequences + decode_position * positions read

The defaults resemble a model of 8 billion parameters with grouped-query attention in bf16 on a
modern data-centre GPU: 16 GB of weights read at about 3 TB/s, 16 GFLOP a token at about
550 TFLOP/s, 0.5 MFLOP a pair of positions, 128 KiB of KV a position. They are no measurement.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields


@dataclass(slots=True)
class StepWork:
    """What one step computes."""

    prefill_tokens: int = 0
    pairs: int = 0
    """Pairs of positions that attention of prefill goes over."""
    decodes: int = 0
    """Sequences that get one more token."""
    positions: int = 0
    """Positions that they attend to, together."""

    def add_prefill(self, num_computed: int, num_tokens: int) -> None:
        """A chunk of `num_tokens` after `num_computed` ones."""
        self.prefill_tokens += num_tokens
        self.pairs += num_tokens * num_computed + num_tokens * (num_tokens + 1) // 2

    def add_decode(self, num_computed: int) -> None:
        """One token after `num_computed` ones."""
        self.decodes += 1
        self.positions += num_computed + 1


@dataclass(frozen=True, slots=True)
class StepTiming:
    """Coefficients, in seconds."""

    base_s: float = 0.006
    prefill_token_s: float = 30e-6
    attention_pair_s: float = 1.3e-9
    decode_s: float = 20e-6
    decode_position_s: float = 40e-9

    def first_step_s(self, work: StepWork) -> float:
        """One step with this work."""
        return (
            self.base_s
            + self.prefill_token_s * work.prefill_tokens
            + self.attention_pair_s * work.pairs
            + self.decode_s * work.decodes
            + self.decode_position_s * work.positions
        )

    def steps_s(self, work: StepWork, steps: int) -> float:
        """So many steps in a row, in which every decoding sequence grows by a token a step."""
        growth = self.decode_position_s * work.decodes
        return steps * self.first_step_s(work) + growth * steps * (steps - 1) / 2

    def steps_within(self, work: StepWork, seconds: float) -> int:
        """The fewest steps in a row that take at least `seconds`; 1 or more."""
        growth = self.decode_position_s * work.decodes
        linear = self.first_step_s(work) - growth / 2
        if growth == 0.0:
            return max(1, math.ceil(seconds / linear))
        root = math.sqrt(linear * linear + 2 * growth * max(0.0, seconds))
        return max(1, math.ceil((root - linear) / growth))

    def scaled(self, factor: float) -> StepTiming:
        """All of it takes `factor` times as long."""
        values = {field.name: getattr(self, field.name) * factor for field in fields(self)}
        return StepTiming(**values)

"""A step of a simulated engine (engine_adapter.simulated): which tokens, and until when."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine_adapter.simulated.sequence import Sequence
from engine_adapter.simulated.timing import StepTiming, StepWork


@dataclass(frozen=True, slots=True)
class Share:
    """What one sequence gets of a step."""

    sequence: Sequence
    num_tokens: int


@dataclass(slots=True)
class Step:
    """One step, or several in a row that only decode."""

    start: float
    end: float = 0.0
    steps: int = 1
    shares: list[Share] = field(default_factory=list)
    work: StepWork = field(default_factory=StepWork)
    """Of the first of them."""

    @property
    def decodes_only(self) -> bool:
        """Every sequence gets one token more of its answer."""
        return self.work.prefill_tokens == 0

    def cut(self, timing: StepTiming, now: float) -> None:
        """End a row of steps with the one that runs now."""
        if self.steps == 1:
            return
        done = timing.steps_within(self.work, now - self.start)
        if done < self.steps:
            self.steps = done
            self.end = self.start + timing.steps_s(self.work, done)

"""Whether blocks that lie below memory are loaded, or computed again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from policies.base import Settings


@dataclass(frozen=True, slots=True)
class LoadCandidate:
    """The run of blocks that could be loaded, block by block."""

    load_s: Sequence[float | None]
    """Until this block and all before it are there; None where the tier was never measured."""
    prefill_s: Sequence[float | None]
    """To compute this block and all before it instead; None where nothing is known yet."""

    def __len__(self) -> int:
        return len(self.load_s)


@dataclass(frozen=True, slots=True)
class LoadDecision:
    """What to load."""

    num_blocks: int
    give_up_s: float | None = None
    """What has not come by then is computed, and earlier where it comes far too slowly. None: no
    limit but the lease."""


class AlwaysLoading(Settings):
    """Load whatever is there."""

    kind: Literal["always"] = "always"

    def decide(self, candidate: LoadCandidate) -> LoadDecision:
        return LoadDecision(len(candidate))


class NeverLoading(Settings):
    """Leave blocks where they are; only memory is reused."""

    kind: Literal["never"] = "never"

    def decide(self, candidate: LoadCandidate) -> LoadDecision:
        del candidate
        return LoadDecision(0)


class FasterThanRecomputeLoading(Settings):
    """Load the run for which the predicted gain, prefill time less load time, is largest; nothing
    where loading takes more than `margin` of the prefill time. While either is unknown the run is
    loaded: that is how it becomes known, and `give_up_s` bounds the loss where prefill is known."""

    kind: Literal["faster_than_recompute"] = "faster_than_recompute"
    margin: float = Field(default=0.9, gt=0.0, le=1.0)

    def decide(self, candidate: LoadCandidate) -> LoadDecision:
        best, best_gain, best_prefill = 0, 0.0, None
        for i in range(len(candidate)):
            load, prefill = candidate.load_s[i], candidate.prefill_s[i]
            if prefill is None:
                return LoadDecision(len(candidate))
            if load is None:
                # Unmeasured from here on: try it, for as long as computing would take.
                last = candidate.prefill_s[-1]
                return LoadDecision(len(candidate), None if last is None else last * self.margin)
            gain = prefill - load
            if load <= self.margin * prefill and gain > best_gain:
                best, best_gain, best_prefill = i + 1, gain, prefill
        return LoadDecision(best, best_prefill)


Loading = Annotated[
    AlwaysLoading | NeverLoading | FasterThanRecomputeLoading, Field(discriminator="kind")
]
"""Add a policy: one class with a `kind` and a `decide()`, its name here, one test."""

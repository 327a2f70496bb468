"""What the whole fleet learned, for replicas that are new."""

from __future__ import annotations

from policies.routing.correction import Correction
from policies.routing.prefill_model import PrefillModel
from policies.routing.work import Observed, Work

DEFAULT_LOAD_TOKEN_S = 1e-5
"""To load one stored token while nothing is known."""

_LOAD_BOUND = 1000.0
"""Loads are taken to be within this factor of the default."""
_TRUSTED_LOADS = 32
"""The default may be far off, and each observation moves it by twofold at most."""


class FleetPrior:
    """One for all replicas of a model. Every one adds what it observed, and learns for itself only
    by which factor it differs."""

    def __init__(self) -> None:
        self.prefill = PrefillModel()
        self._load = Correction(bound=_LOAD_BOUND)

    @property
    def knows_loads(self) -> bool:
        """Well enough to judge a replica by."""
        return self._load.observations >= _TRUSTED_LOADS

    def observe(self, observed: Observed, prefill_s: float | None) -> None:
        """A finished request; `prefill_s` where it is known."""
        work = observed.work
        if prefill_s is not None:
            self.prefill.observe(work.uncached_tokens, work.context_tokens, prefill_s)
        if work.stored_tokens > 0 and observed.load_s > 0.0:
            self._load.observe(work.stored_tokens * DEFAULT_LOAD_TOKEN_S, observed.load_s)

    def load_s(self, work: Work) -> float:
        """To load its stored tokens."""
        return work.stored_tokens * DEFAULT_LOAD_TOKEN_S * self._load.factor

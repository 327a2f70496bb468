"""The sequence numbers of one publisher: what to do with the next batch. Pure, no sockets.

Batches come live (in order, with losses, from one publisher at a time) and by replay (from a
sequence on). A publisher that restarts counts from 0 again. What names a batch beyond doubt is
its sequence with the time at which it was published.
"""

from __future__ import annotations

import enum


class Verdict(enum.Enum):
    """What to do with a batch."""

    APPLY = "apply"
    SKIP = "skip"
    """Known already."""
    GAP = "gap"
    """Something before it was lost."""
    RESTART = "restart"
    """It comes from another incarnation of the publisher."""


class EventSequence:
    """Follows one publisher. `APPLY` means that the batch counts as applied."""

    def __init__(self) -> None:
        self._next: int | None = None
        """The sequence that comes next; None: any may."""
        self._last_ts: float | None = None
        self._last_live: int | None = None

    @property
    def last(self) -> int | None:
        """Sequence of the last applied batch; None: nothing applied since the last `reset`."""
        return self._next - 1 if self._next else None

    def reset(self) -> None:
        """Everything that was applied has been thrown away; any batch may come next."""
        self._next = None
        self._last_ts = None

    def expect_first(self) -> None:
        """Nothing was published yet: the next batch is the first."""
        self._next = 0

    def forget_live(self) -> None:
        """The connection is another one: its first batch may be any."""
        self._last_live = None

    def live(self, sequence: int, ts: float | None) -> Verdict:
        """A batch from the live stream. `ts`: None when the batch cannot be decoded."""
        if self._next is not None and sequence < self._next:
            backwards = self._last_live is not None and sequence <= self._last_live
            newer = ts is not None and self._last_ts is not None and ts > self._last_ts
            if backwards or newer:
                return Verdict.RESTART
            self._last_live = sequence
            return Verdict.SKIP
        if self._next is not None and sequence > self._next:
            return Verdict.GAP
        self._last_live = sequence
        return self._apply(sequence, ts)

    def replayed(self, sequence: int, ts: float | None, *, is_first: bool) -> Verdict:
        """A batch of a replay that was asked from `last` on (from 0 when there is none). Its first
        batch must be the last applied one again, which proves that the publisher is the same. A
        later one, be it the next, means that the publisher has forgotten that one, or never had
        it; then the caller resets."""
        if self._next is None:
            return self._apply(sequence, ts)
        if sequence > self._next or (is_first and sequence == self._next and self._next > 0):
            return Verdict.GAP
        if sequence == self._next:
            return self._apply(sequence, ts)
        if sequence == self._next - 1 and ts == self._last_ts:
            return Verdict.SKIP
        return Verdict.RESTART

    def _apply(self, sequence: int, ts: float | None) -> Verdict:
        self._next = sequence + 1
        self._last_ts = ts
        return Verdict.APPLY

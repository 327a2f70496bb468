"""How fast places become free while all of them are taken. No I/O."""

from __future__ import annotations

from collections import deque

_MAX_FREED = 64
_MIN_S, _MAX_S = 1, 60


class Turnover:
    """Looks at the last places that became free since the house is full: before that, they say
    how many came, not how many can be served."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._freed: deque[float] = deque(maxlen=_MAX_FREED)

    def full(self, now: float) -> None:
        """Somebody finds no free place."""
        if self._since is None:
            self._since = now

    def freed(self, now: float) -> None:
        """Somebody who had a place goes."""
        if self._since is None:
            return
        if len(self._freed) == _MAX_FREED:
            self._since = self._freed[0]
        self._freed.append(now)

    def idle(self) -> None:
        """A place is free and nobody wants it."""
        self._since = None
        self._freed.clear()

    def retry_after_s(self, num_waiting: int, now: float) -> int:
        """Whole seconds until all who wait now have got their turn, 1 to 60. Where nobody has
        gone yet, as long again as nobody has."""
        elapsed_s = 0.0 if self._since is None else now - self._since
        if self._freed:
            elapsed_s *= (num_waiting + 1) / len(self._freed)
        return max(_MIN_S, min(_MAX_S, -int(-elapsed_s // 1)))

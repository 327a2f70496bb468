"""The prompts that an engine has still to compute, first come first served."""

from __future__ import annotations

from dataclasses import dataclass

MAX_OVERDUE_S = 30.0
"""What a prompt that is late is expected to take still, at most."""

_OVERDUE_SHARE = 0.5
"""Of what it is late already: what takes longer than expected takes longer still."""


@dataclass(frozen=True, slots=True)
class _Prompt:
    added_s: float
    came: float


class PrefillQueue:
    """Requests that were sent and have no first token yet. Every operation is O(1)."""

    def __init__(self) -> None:
        self._prompts: dict[str, _Prompt] = {}
        self._total_s = 0.0
        self._left = 0.0
        """When a prompt was done or given up last: since then the first one is computed."""

    def __len__(self) -> int:
        return len(self._prompts)

    def __contains__(self, key: str) -> bool:
        return key in self._prompts

    def add(self, key: str, added_s: float, now: float) -> None:
        """At the end; `key` is new. `added_s`: seconds of computing."""
        if not self._prompts:
            self._total_s = 0.0  # what rounding left
        self._prompts[key] = _Prompt(added_s, now)
        self._total_s += added_s

    def remove(self, key: str, now: float) -> None:
        """It has its first token, or ended without; unknown keys are ignored."""
        prompt = self._prompts.pop(key, None)
        if prompt is not None:
            self._total_s -= prompt.added_s
            self._left = now

    def clear(self) -> None:
        """None is left."""
        self._prompts.clear()
        self._total_s = 0.0

    def oldest(self) -> str | None:
        """The first one; None when there is none."""
        return next(iter(self._prompts), None)

    def seconds(self, now: float) -> float:
        """Until all of them are computed."""
        for first in self._prompts.values():
            elapsed_s = max(0.0, now - max(first.came, self._left))
            others_s = max(0.0, self._total_s - first.added_s)
            late_s = elapsed_s - first.added_s
            if late_s <= 0.0:
                return others_s - late_s
            return others_s + min(MAX_OVERDUE_S, _OVERDUE_SHARE * late_s)
        return 0.0

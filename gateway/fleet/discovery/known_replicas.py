"""The replicas that a discovery found last."""

from __future__ import annotations

from collections.abc import Sequence

from policies.engine import EngineConfig


class KnownReplicas:
    """Tells whether a list says anything new; its order says nothing."""

    def __init__(self) -> None:
        self._by_id: dict[str, EngineConfig] | None = None
        """None before the first list."""

    def __bool__(self) -> bool:
        return bool(self._by_id)

    def learn(self, engines: Sequence[EngineConfig]) -> bool:
        """There are these now, with ids that differ. True: that is news."""
        by_id = {engine.id: engine for engine in engines}
        if by_id == self._by_id:
            return False
        self._by_id = by_id
        return True

"""A kind of eviction that may not refuse blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, Protocol

from policies.eviction.base import B, EvictionQueue


class Kind(Protocol):
    """Any of policies.eviction."""

    def queue(self) -> EvictionQueue[Any]: ...


class LetsAllInQueue(Generic[B]):
    """Another queue, but for its refusals."""

    def __init__(self, queue: EvictionQueue[B]) -> None:
        self._queue = queue
        self.insert = queue.insert
        self.use = queue.use
        self.add = queue.add
        self.discard = queue.discard
        self.pop = queue.pop
        self.remove = queue.remove

    def admits(self, block: B, now: float) -> bool:
        del block, now
        return True

    def __len__(self) -> int:
        return len(self._queue)


@dataclass(frozen=True, slots=True)
class LetsAllIn:
    """For a tier above others: what it refused could neither go down nor come up through it."""

    kind: Kind

    def queue(self) -> EvictionQueue[Any]:
        return LetsAllInQueue[Any](self.kind.queue())

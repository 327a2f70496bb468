"""A tier of single blocks that a test drives by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from policies.access import Access
from policies.eviction import EvictionQueue


@dataclass(eq=False)
class NamedBlock:
    """A block as policies see it."""

    hash: bytes
    inserted: int
    last_used: int
    depth: int = 0
    num_tokens: int = 32
    num_bytes: int = 64
    access: Access = field(default_factory=Access)
    mark: Any = None


class Tier:
    """Every block is a candidate; names are single letters."""

    def __init__(self, queue: EvictionQueue[NamedBlock]) -> None:
        self.queue = queue
        self.blocks: dict[str, NamedBlock] = {}
        self.clock = 0

    def insert(self, names: str, **facts: int) -> None:
        for name in names:
            self.clock += 1
            block = NamedBlock(name.encode(), self.clock, self.clock, **facts)
            self.blocks[name] = block
            self.queue.insert(block)
            self.queue.add(block)

    def use(self, names: str) -> None:
        for name in names:
            self.clock += 1
            self.blocks[name].last_used = self.clock
            self.queue.use([self.blocks[name]])
            self.queue.add(self.blocks[name])

    def evict(self, count: int = 1) -> str:
        """Names of the victims, in order."""
        names = ""
        for _ in range(count):
            victim = self.queue.pop(0.0)
            assert victim is not None
            self.queue.remove(victim)
            del self.blocks[victim.hash.decode()]
            names += victim.hash.decode()
        return names


@pytest.fixture
def tier_of() -> Callable[[Any], Tier]:
    """A tier that follows a policy."""
    return lambda eviction: Tier(eviction.queue())

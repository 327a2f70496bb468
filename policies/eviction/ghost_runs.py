"""Runs of blocks that have left or were refused, remembered by their first block."""

from __future__ import annotations

from collections.abc import Iterator, ValuesView

from policies.eviction.request_runs import Ghost, Run


class GhostRuns:
    """Ghosts by hash, the oldest first. Its owner bounds it with `trim`."""

    def __init__(self) -> None:
        self._ghosts: dict[bytes, Ghost] = {}

    def __len__(self) -> int:
        return len(self._ghosts)

    def values(self) -> ValuesView[Ghost]:
        return self._ghosts.values()

    def get(self, block_hash: bytes) -> Ghost | None:
        return self._ghosts.get(block_hash)

    def take(self, block_hash: bytes) -> Ghost | None:
        """It is no ghost any more."""
        return self._ghosts.pop(block_hash, None)

    def add(self, ghost: Ghost) -> Ghost | None:
        """Returns the one that it replaces."""
        replaced = self._ghosts.pop(ghost.hash, None)
        self._ghosts[ghost.hash] = ghost
        ghost.run.ghost = ghost
        return replaced

    def with_tail(self, block_hash: bytes, depth: int, run: Run, tokens: int) -> Ghost:
        """A block that leaves, and the tail that went just before it: one ghost for both."""
        tail = run.ghost
        if tail is not None and tail.depth == depth + 1 and tail is self.get(tail.hash):
            del self._ghosts[tail.hash]
            tokens += tail.tokens
        return Ghost(block_hash, run, tokens, depth)

    def trim(self, limit: int) -> Iterator[Ghost]:
        """Forget the oldest until `limit` are left."""
        while len(self._ghosts) > limit:
            yield self._ghosts.pop(next(iter(self._ghosts)))

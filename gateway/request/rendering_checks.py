"""Samples that tell whether prompts are rendered here as the engine does it.

A rendering of the right length can still be of the wrong tokens. But an engine that computed a
prompt announces its blocks, so our first block of it must have been resident soon afterwards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Protocol

from gateway.accounts.record import Outcome
from gateway.request.call import Call
from prefix_store.base import BlockHash


class History(Protocol):
    """What was ever announced."""

    def was_resident(self, block_hash: BlockHash) -> bool | None:
        """Whether any holder has had the block; None when it is unknown here."""


class Announcements(Protocol):
    """The event stream of one engine."""

    def progress(self) -> int | None:
        """Batches applied since the start; None while anything that it said may be lost here."""


class RenderingChecks:
    """At most one sample a replica is under way, so the cost does not grow with the traffic."""

    def __init__(
        self,
        history: History,
        announcements: Mapping[str, Announcements],
        count: Callable[[str, bool], None],
        *,
        after_s: float = 2.0,
    ) -> None:
        """`announcements`: by replica. `count`: told of every verdict, with the replica and
        whether the rendering was confirmed. `after_s`: how late an event may come."""
        self._history = history
        self._announcements = announcements
        self._count = count
        self._after_s = after_s
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._progress: dict[str, int] = {}
        """Of each replica, at its last verdict."""

    def __len__(self) -> int:
        """Samples under way."""
        return len(self._timers)

    def consider(self, call: Call) -> None:
        """Take a sample of an ended call, if it can tell anything: the engine has computed all of
        its prompt by itself, of which at least the first block is full."""
        replica = call.replica
        if replica is None or replica in self._timers:
            return
        if call.outcome is not Outcome.OK or call.prompt is None or call.usage is None:
            return
        prompt, usage = call.prompt, call.usage
        if (
            not prompt.block_hashes
            or usage.cached_tokens != 0
            or replica not in self._announcements
        ):
            return
        if usage.prompt_tokens != prompt.num_tokens:
            return  # known to differ already
        self._timers[replica] = asyncio.get_running_loop().call_later(
            self._after_s, self._judge, replica, prompt.block_hashes[0]
        )

    def close(self) -> None:
        """Give up the samples under way."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _judge(self, replica: str, block_hash: BlockHash) -> None:
        del self._timers[replica]
        announcements = self._announcements.get(replica)  # None: removed meanwhile
        progress = None if announcements is None else announcements.progress()
        if progress is None or progress == self._progress.get(replica, 0):
            return  # of a silent stream nothing can be said
        confirmed = self._history.was_resident(block_hash)
        if confirmed is not None:
            self._progress[replica] = progress
            self._count(replica, confirmed)

"""Questions to a shared tier: one round trip each, while the engine goes on with other work."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prefix_store.base import BlockHash
from prefix_store.lower_tier import LowerTier

logger = logging.getLogger(__name__)

KEPT_S = 1.0
"""An answer that nobody fetched by then is forgotten."""

MAX_LOOKUPS = 4096


@dataclass(frozen=True, slots=True)
class _Question:
    request: str
    last: BlockHash
    """Of the prefix: several prompts may come under one name."""


@dataclass(slots=True)
class _Lookup:
    began: float
    task: asyncio.Task[int]


class SharedLookups:
    """One question at a time for each request and prefix; bounded."""

    def __init__(self, timeout_s: float, clock: Callable[[], float]) -> None:
        self.timeout_s = timeout_s
        self._clock = clock
        self._lookups: OrderedDict[_Question, _Lookup] = OrderedDict()

    def ask(self, request: str, tier: LowerTier, hashes: Sequence[BlockHash]) -> int | None:
        """How much of a prefix the tier has; None: asked, and not answered yet. A request without
        a name and a tier that takes too long get 0."""
        if not request:
            return 0
        question = _Question(request, hashes[-1])
        lookup = self._lookups.get(question)
        if lookup is None:
            if len(self._lookups) >= MAX_LOOKUPS:
                return 0
            task = asyncio.get_running_loop().create_task(self._count(tier, list(hashes)))
            self._lookups[question] = _Lookup(self._clock(), task)
            return None
        if self._is_open(lookup):
            return None
        del self._lookups[question]
        if not lookup.task.done():
            lookup.task.cancel()
            return 0
        return 0 if lookup.task.cancelled() else lookup.task.result()

    def is_waiting(self, request: str, hashes: Sequence[BlockHash]) -> bool:
        """Whether the tier was asked this and has not answered yet."""
        if not self._lookups or not hashes:
            return False
        lookup = self._lookups.get(_Question(request, hashes[-1]))
        return lookup is not None and self._is_open(lookup)

    def expire(self) -> None:
        """Forget answers that nobody fetched."""
        now = self._clock()
        while self._lookups:
            question, lookup = next(iter(self._lookups.items()))
            if lookup.began + KEPT_S > now:
                return
            lookup.task.cancel()
            del self._lookups[question]

    async def close(self) -> None:
        """Give all questions up."""
        tasks = [lookup.task for lookup in self._lookups.values()]
        self._lookups.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _is_open(self, lookup: _Lookup) -> bool:
        return not lookup.task.done() and self._clock() - lookup.began <= 2 * self.timeout_s

    async def _count(self, tier: LowerTier, hashes: Sequence[BlockHash]) -> int:
        try:
            async with asyncio.timeout(self.timeout_s):
                return await tier.count(hashes)
        except TimeoutError:
            return 0
        except Exception:
            # The outermost boundary of this task: whatever went wrong there is a miss here.
            logger.exception("%s: a look-up failed; it counts as a miss", tier.settings.name)
            return 0

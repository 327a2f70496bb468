"""Work that must never hold up a request: done by a thread of its own, or not at all."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")

_BATCH = 64


@dataclass(frozen=True, slots=True)
class SideQueueStats:
    """Items since the start, and those that wait now."""

    waiting: int
    done: int
    dropped: int
    """More came than the thread could do; the oldest went."""
    failed: int


class SideQueue(Generic[T]):
    """Hands items to `handle`, in order and in batches, in one thread. Of any thread to add to."""

    def __init__(
        self,
        name: str,
        handle: Callable[[list[T]], None],
        *,
        expected: tuple[type[Exception], ...] = (),
        max_weight: int = 4096,
    ) -> None:
        """What `handle` raises counts as the failure of the whole batch; what is not `expected`
        is logged with its trace. `max_weight`: of the items that wait, all together."""
        self._name = name
        self._handle = handle
        self._expected = expected
        self._max_weight = max_weight
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._lock = threading.Lock()
        self._waiting: deque[tuple[T, int]] = deque()
        self._weight = 0
        self._running = False
        self._closed = False
        self._done = 0
        self._dropped = 0
        self._failed = 0

    def add(self, item: T, weight: int = 1) -> None:
        """Never blocks for long and never fails; the oldest items make room."""
        with self._lock:
            if self._closed or weight > self._max_weight:
                self._dropped += 1
                return
            while self._weight + weight > self._max_weight:
                self._weight -= self._waiting.popleft()[1]
                self._dropped += 1
            self._waiting.append((item, weight))
            self._weight += weight
            if not self._running:
                self._running = True
                self._thread.submit(self._drain)

    def stats(self) -> SideQueueStats:
        with self._lock:
            return SideQueueStats(len(self._waiting), self._done, self._dropped, self._failed)

    def close(self) -> None:
        """Finish what waits; what comes later is dropped. Idempotent."""
        with self._lock:
            self._closed = True
        self._thread.shutdown()

    def _drain(self) -> None:
        while batch := self._take():
            failed = not self._handled(batch)
            with self._lock:
                if failed:
                    self._failed += len(batch)
                else:
                    self._done += len(batch)

    def _take(self) -> list[T]:
        batch: list[T] = []
        with self._lock:
            while self._waiting and len(batch) < _BATCH:
                item, weight = self._waiting.popleft()
                self._weight -= weight
                batch.append(item)
            if not batch:
                self._running = False
        return batch

    def _handled(self, batch: list[T]) -> bool:
        try:
            self._handle(batch)
        except self._expected as error:
            log.debug("%s: %s", self._name, error)
            return False
        except Exception:
            log.exception("%s failed", self._name)
            return False
        return True

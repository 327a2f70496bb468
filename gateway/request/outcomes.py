"""Tells the store of this host how answers ended, which its policies learn from."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gateway.request.side_queue import SideQueue, SideQueueStats
from policies.access import Stop
from prefix_store.base import StoreError, StoreUnavailableError
from prefix_store.client import StoreClient

_TIMEOUT_S = 1.0
_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class _Ended:
    report_id: str
    stop: Stop
    output_tokens: int


class Outcomes:
    """Keeps one connection in one thread. Where the store is away, what there was to say is dropped
    and counted: it would only have made evictions a little better."""

    def __init__(
        self,
        socket: Path,
        *,
        max_waiting: int = 4096,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._socket = socket
        self._clock = clock
        self._client: StoreClient | None = None
        self._away_until = float("-inf")
        self._queue = SideQueue[_Ended](
            "outcomes", self._send, expected=(StoreError,), max_weight=max_waiting
        )

    def tell(self, report_id: str, stop: Stop, output_tokens: int) -> None:
        """The answer under this `Call.report_id` has ended. Returns at once."""
        self._queue.add(_Ended(report_id, stop, output_tokens))

    def stats(self) -> SideQueueStats:
        return self._queue.stats()

    def close(self) -> None:
        """Say what is left to say, and give the connection up. Idempotent."""
        self._queue.close()
        self._disconnect()

    def _send(self, batch: list[_Ended]) -> None:
        if self._clock() < self._away_until:
            raise StoreUnavailableError("the store was away a moment ago")
        try:
            client = self._connected()
            for ended in batch:
                client.outcome(ended.report_id, ended.stop.value, ended.output_tokens)
        except StoreError:
            self._disconnect()
            self._away_until = self._clock() + _RETRY_S
            raise

    def _connected(self) -> StoreClient:
        """A store that has restarted is noticed before anything is sent into the old connection."""
        if self._client is not None and not self._client.wait_hang_up(0.0):
            return self._client
        self._disconnect()
        self._client = StoreClient.connect(
            self._socket, client="gateway/outcomes", timeout_s=_TIMEOUT_S
        )
        return self._client

    def _disconnect(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

"""A connection to the store that heals itself, for engines: the engine never waits for it."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from prefix_store.base import StoreError
from prefix_store.client import StoreClient

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0
HEALTHY_AFTER_S = 10.0


class StoreLink:
    """Connects in a thread of its own, again and again while the store is away, with growing
    pauses: that is also the circuit breaker, since a request that timed out closes its client."""

    def __init__(
        self, path: Path, client: str, prepare: Callable[[StoreClient], None] | None = None
    ) -> None:
        """`prepare` gets each new connection before anybody uses it, in the link's thread."""
        self._path = path
        self._name = client
        self._prepare = prepare
        self._current: StoreClient | None = None
        self._stop = threading.Event()
        self._tried = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headstart-link", daemon=True)
        self._thread.start()

    def client(self) -> StoreClient | None:
        """The live connection; None while there is none. Never blocks."""
        client = self._current
        return client if client is not None and not client.closed else None

    def wait_first_try(self, timeout_s: float) -> None:
        """Give the first attempt a moment, so that an engine that starts with a store uses it from
        its first request on."""
        self._tried.wait(timeout_s)

    def close(self) -> None:
        """Stop connecting and close the connection."""
        self._stop.set()
        self._thread.join(timeout=5.0)
        client, self._current = self._current, None
        if client is not None:
            client.hang_up()

    def _run(self) -> None:
        pause = FIRST_PAUSE_S
        while not self._stop.is_set():
            client = self._connect()
            self._tried.set()
            if client is not None:
                connected = time.monotonic()
                self._watch(client)
                self._current = None
                client.hang_up()
                if time.monotonic() - connected > HEALTHY_AFTER_S:
                    pause = FIRST_PAUSE_S
            if self._stop.wait(pause):
                return
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def _connect(self) -> StoreClient | None:
        try:
            client = StoreClient.connect(self._path, client=self._name)
        except StoreError as error:
            logger.debug("%s", error)
            return None
        if self._prepare is not None:
            self._prepare(client)
        self._current = client
        with contextlib.suppress(StoreError):  # gone again already: the watch will see it
            client.serving()
        logger.info(
            "connected to store %s (%.2f GiB)",
            client.welcome.store, client.arena.num_bytes / 2**30,
        )  # fmt: skip
        return client

    def _watch(self, client: StoreClient) -> None:
        while not client.closed and not self._stop.is_set():
            if client.wait_hang_up(timeout_s=0.2):
                logger.warning("the store is gone; prompts are computed until it is back")
                return

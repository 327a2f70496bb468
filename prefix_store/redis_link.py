"""The connection to Redis: rounds of commands with time-outs, a circuit breaker, reconnection.

A round is one pipeline: one round trip, or one to each node of a cluster at the same time.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis, RedisCluster
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ClusterDownError,
    OutOfMemoryError,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from prefix_store.breaker import CircuitBreaker
from prefix_store.redis_client import FAULTS, close_client, open_client, words_of
from prefix_store.redis_faults import FaultLog, RedisCounters
from prefix_store.redis_fetch import WINDOW_BYTES, Reply, fetch

Command = tuple[bytes | str | int, ...]

MIN_BYTES_PER_S = 1_000_000
"""A transfer that is slower than this is taken for a hang."""

MIN_CONNECT_S = 0.05
CLOSE_GRACE_S = 0.05
SMALL_AT_ONCE = 16
TRANSFERS_AT_ONCE = 4
"""Rounds that carry records: a slow link is shared by few, so each of them gets on."""

_LOST = (RedisConnectionError, RedisTimeoutError, ClusterDownError, OSError)


@dataclass(frozen=True, slots=True)
class Refused:
    """An error that Redis answered to one command."""

    full: bool
    """Out of memory."""


class RedisLink:
    """Owns the client. Faults are counted and logged here; a round that failed gives None."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self.counters = RedisCounters()
        self._url = url
        self._timeout_s = timeout_s
        self._connect_s = max(MIN_CONNECT_S, timeout_s)
        self._log = FaultLog(url)
        self._breaker = CircuitBreaker()
        self._opened = asyncio.Event()
        self._small = asyncio.Semaphore(SMALL_AT_ONCE)
        self._transfer = asyncio.Semaphore(TRANSFERS_AT_ONCE)
        self._deadlines: set[asyncio.Timeout] = set()
        self._client = open_client(url, self._connect_s)
        self._healing: asyncio.Task[None] | None = None

    @property
    def breaker(self) -> str:
        return self._breaker.state

    @property
    def is_up(self) -> bool:
        """Whether a round would be tried now."""
        return self._breaker.is_closed

    def start(self) -> None:
        """From now on a broken link is probed until it works."""
        if self._healing is None:
            self._healing = asyncio.get_running_loop().create_task(self._heal())

    async def close(self) -> None:
        if self._healing is not None:
            self._healing.cancel()
            await asyncio.gather(self._healing, return_exceptions=True)
            self._healing = None
        await close_client(self._client)
        # Connections that were given up in the middle still send what they had begun.
        await asyncio.sleep(CLOSE_GRACE_S)

    async def round(
        self, commands: Sequence[Command], payload_bytes: int = 0, patience_s: float = 0.0
    ) -> list[Any] | None:
        """The answers to commands, in their order, `Refused` for an error; None when there was no
        answer. `payload_bytes`: of records that go or come. `patience_s`: more time."""
        if not commands:
            return []
        began = time.monotonic()
        try:
            return await self._in_turn(
                lambda deadline: self._execute(commands), payload_bytes, patience_s
            )
        except asyncio.CancelledError:
            # Whoever asked had a time limit of its own, and it ran out here.
            if not payload_bytes and time.monotonic() - began >= self._timeout_s / 2:
                self._timed_out(self._timeout_s)
            raise

    @property
    def can_fetch(self) -> bool:
        """A cluster's values lie on many connections, which redis-py chooses."""
        return isinstance(self._client, Redis)

    async def fetch(
        self,
        keys: Sequence[bytes],
        into: Sequence[memoryview],
        landed: Callable[[Reply], None],
    ) -> bool:
        """GET values straight into buffers; `landed` hears of each as it comes. False: it ended
        early. It may take as long as it likes while values keep coming."""
        if not keys:
            return True
        sizes = [len(buffer) for buffer in into]
        window_bytes = max(*sizes, min(sum(sizes), WINDOW_BYTES))
        answers = await self._in_turn(
            lambda deadline: self._fetch(deadline, window_bytes, keys, into, landed), window_bytes
        )
        return answers is not None

    async def _fetch(
        self,
        deadline: asyncio.Timeout,
        window_bytes: int,
        keys: Sequence[bytes],
        into: Sequence[memoryview],
        landed: Callable[[Reply], None],
    ) -> list[Any]:
        loop = asyncio.get_running_loop()
        more_s = self._timeout_s + window_bytes / MIN_BYTES_PER_S
        replies: list[Any] = []

        def note(reply: Reply) -> None:
            replies.append(reply)
            with contextlib.suppress(RuntimeError):  # it has just ended
                deadline.reschedule(loop.time() + more_s)
            landed(reply)

        pool = self._client.connection_pool  # type: ignore[union-attr]
        connection = await pool.get_connection()
        try:
            await fetch(connection, keys, into, note)
        finally:
            await pool.release(connection)
        return replies

    async def _in_turn(
        self,
        call: Callable[[asyncio.Timeout], Awaitable[list[Any]]],
        payload_bytes: int,
        patience_s: float = 0.0,
    ) -> list[Any] | None:
        """The answers of a call, which gets so much time; None when there were none."""
        budget_s = self._timeout_s + payload_bytes / MIN_BYTES_PER_S + patience_s
        budget_s += self._connect_s  # it may need a new connection
        async with self._transfer if payload_bytes else self._small:
            if not self._breaker.is_closed:
                self.counters.calls_while_open += 1
                return None
            return await self._within(budget_s, call)

    async def _within(
        self, budget_s: float, call: Callable[[asyncio.Timeout], Awaitable[list[Any]]]
    ) -> list[Any] | None:
        try:
            async with asyncio.timeout(budget_s) as deadline:
                self._deadlines.add(deadline)
                try:
                    answers = await call(deadline)
                finally:
                    self._deadlines.discard(deadline)
        except (TimeoutError, RedisTimeoutError):
            self._timed_out(budget_s)
            return None
        except FAULTS as error:
            self._failed(error)
            return None
        return self._sorted_out(answers)

    async def _execute(self, commands: Sequence[Command]) -> list[Any]:
        if isinstance(self._client, RedisCluster):
            pipeline: Any = self._client.pipeline()
        else:
            pipeline = self._client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        answers: list[Any] = await pipeline.execute(raise_on_error=False)
        return answers

    def _sorted_out(self, answers: list[Any]) -> list[Any] | None:
        """Errors among the answers: those of the link fail the round."""
        refused: RedisError | None = None
        for i, answer in enumerate(answers):
            if isinstance(answer, _LOST):
                self._failed(answer)
                return None
            if isinstance(answer, OutOfMemoryError):
                answers[i] = Refused(full=True)
                self.counters.writes_full += 1
                self._log.refused("OOM")
            elif isinstance(answer, Exception):
                answers[i] = Refused(full=False)
                refused = answer if isinstance(answer, RedisError) else ResponseError(str(answer))
        if refused is not None:
            self._failed(refused)
        else:
            self._succeeded()
        return answers

    def _succeeded(self) -> None:
        if not self._breaker.is_closed:
            self._log.closed()
        self._breaker.succeeded()
        self._opened.clear()

    def _timed_out(self, budget_s: float) -> None:
        self.counters.timeouts += 1
        self._log.timed_out(budget_s)
        self._break()

    def _failed(self, error: Exception) -> None:
        words = words_of(error)
        if isinstance(error, (BusyLoadingError, AuthenticationError, ResponseError)):
            self.counters.refusals += 1
            self._log.refused(words)
        else:
            self.counters.disconnects += 1
            self._log.unreachable(words)
        self._break()

    def _break(self) -> None:
        if not self._breaker.failed(time.monotonic()):
            return
        self.counters.breaker_openings += 1
        self._log.opened()
        self._opened.set()
        # What is under way waits for the same server.
        now = asyncio.get_running_loop().time()
        for deadline in self._deadlines:
            with contextlib.suppress(RuntimeError):
                deadline.reschedule(now)

    async def _heal(self) -> None:
        while True:
            await self._opened.wait()
            await asyncio.sleep(self._breaker.wait_s(time.monotonic()))
            if self._breaker.begin_probe(time.monotonic()):
                await self._probe()

    async def _probe(self) -> None:
        """With connections of its own: a cluster may look different now."""
        fresh = open_client(self._url, self._connect_s)
        try:
            async with asyncio.timeout(self._connect_s + self._timeout_s):
                if isinstance(fresh, RedisCluster):
                    # With a part of the blocks missing hardly any prefix is whole.
                    await fresh.ping(target_nodes=RedisCluster.PRIMARIES)
                else:
                    await fresh.ping()
        except (*FAULTS, TimeoutError) as error:
            self._log.unreachable(words_of(error))
            self._breaker.failed(time.monotonic())
            await close_client(fresh)
            return
        self._client, old = fresh, self._client
        self._succeeded()
        await close_client(old)

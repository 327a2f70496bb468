"""The blocking client of a store server, for engines (in their own threads) and tools."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from prefix_store import protocol
from prefix_store.arena import Arena
from prefix_store.base import BlockHash, StoreProtocolError, StoreUnavailableError
from prefix_store.events import BlocksLoaded

A = TypeVar("A", bound=protocol.Answer)

CONNECT_TIMEOUT_S = 2.0
REQUEST_TIMEOUT_S = 0.25


class StoreClient:
    """One connection and one mapping of the arena. Thread-safe. After any error the connection is
    closed and every further call raises StoreUnavailableError; make a new client then."""

    def __init__(self, connection: socket.socket, welcome: protocol.Welcome, arena: Arena) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._closed = False
        self.welcome = welcome
        self.arena = arena

    @classmethod
    def connect(
        cls,
        path: Path,
        *,
        client: str = "tool",
        timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> StoreClient:
        """Say Hello and map the arena. Raises StoreUnavailableError, StoreProtocolError."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(CONNECT_TIMEOUT_S)
        fds: list[int] = []
        try:
            connection.connect(str(path))
            hello = protocol.Hello(protocol.VERSION, client)
            connection.sendall(protocol.frame(hello))
            data, fds, _, _ = socket.recv_fds(connection, protocol.MAX_FRAME_BYTES, 1)
            answer = protocol.decode_answer(_rest(connection, data))
            if isinstance(answer, protocol.Refused):
                raise StoreProtocolError(answer.reason)
            if not isinstance(answer, protocol.Welcome) or not fds:
                raise StoreProtocolError("the store did not answer Hello with Welcome")
            if os.fstat(fds[0]).st_size < answer.arena_bytes:
                raise StoreProtocolError("the store's arena is shorter than it says")
            connection.settimeout(timeout_s)
            arena = Arena(fds.pop(), answer.arena_bytes)
            arena.close_descriptor()
            return cls(connection, answer, arena)
        except OSError as error:
            connection.close()
            raise StoreUnavailableError(
                f"no store at {path} ({error.strerror or error}); start it with `headstart store`"
            ) from error
        except StoreProtocolError:
            connection.close()
            raise
        finally:
            for fd in fds:
                os.close(fd)

    def serving(self) -> None:
        """Be counted among the engines' connectors."""
        self._tell(protocol.Serving())

    def match(
        self,
        hashes: list[BlockHash],
        lease_from: int,
        *,
        request: str = "",
        record_bytes: int = 0,
        block_tokens: int = 0,
        facts: protocol.Facts | None = None,
    ) -> protocol.Matched:
        """How many blocks of a prefix are there; those from `lease_from` on get leased. With
        `record_bytes` those that lie below memory are brought up (see Matched.arriving)."""
        joined = protocol.join_hashes(hashes)
        question = protocol.Match(
            joined, lease_from, request, record_bytes, block_tokens, facts or protocol.Facts()
        )
        return self._ask(question, protocol.Matched)

    def progress(self, lease: int) -> protocol.Progressed:
        """How many of a lease's arriving blocks are there now."""
        return self._ask(protocol.Progress(lease), protocol.Progressed)

    def computed(self, num_tokens: int, attended: float, seconds: float) -> None:
        """Tell what a step of the engine took."""
        self._tell(protocol.Computed(num_tokens, attended, seconds))

    def reserve(
        self,
        parent: BlockHash,
        is_root: bool,
        hashes: list[BlockHash],
        record_bytes: int,
        request: str = "",
    ) -> protocol.Reserved:
        """Places for the records of a run of blocks; None where there is nothing to write."""
        joined = protocol.join_hashes(hashes)
        question = protocol.Reserve(parent, is_root, joined, record_bytes, request)
        return self._ask(question, protocol.Reserved)

    def commit(self, tickets: Sequence[int], salt: str, request: str = "") -> None:
        self._tell(protocol.Commit(list(tickets), salt, request))

    def cancel(self, tickets: Sequence[int]) -> None:
        self._tell(protocol.Cancel(list(tickets)))

    def release(self, lease: int, loaded: BlocksLoaded | None = None) -> None:
        self._tell(protocol.Release(lease, loaded))

    def outcome(self, request_id: str, stop: str, output_tokens: int) -> None:
        """Tell how the answer to a request ended."""
        self._tell(protocol.Outcome(request_id, stop, output_tokens))

    def drop(self, block_hash: BlockHash) -> None:
        self._tell(protocol.Drop(block_hash))

    def clear(self) -> int:
        """Blocks that went."""
        return self._ask(protocol.Clear(), protocol.Cleared).num_blocks

    def pins(self, *, tenant: str = "", session: str = "", prefix: str = "") -> protocol.Pins:
        """Pinned blocks by owner and tier; empty texts match any."""
        return self._ask(protocol.GetPins(tenant, session, prefix), protocol.Pins)

    def unpin(self, *, tenant: str = "", session: str = "", prefix: str = "") -> int:
        """End the pins of an owner; how many blocks that were."""
        request = protocol.Unpin(tenant, session, prefix)
        return self._ask(request, protocol.Cleared).num_blocks

    def reload_refused(self, reason: str) -> None:
        """Tell that the newest configuration cannot be used, for the statistics."""
        self._tell(protocol.ReloadRefused(reason))

    def stats(self) -> protocol.StoreStats:
        return self._ask(protocol.GetStats(), protocol.StoreStats)

    def wait_hang_up(self, timeout_s: float) -> bool:
        """Wait until the store closes the connection; False when the time is over first. It never
        takes an answer away from a request."""
        try:
            poller = select.poll()
            poller.register(self._connection, select.POLLRDHUP | select.POLLHUP | select.POLLERR)
            hung_up = bool(poller.poll(timeout_s * 1000))
        except (OSError, ValueError):
            hung_up = True
        if hung_up:
            self.hang_up()
        return hung_up

    @property
    def closed(self) -> bool:
        return self._closed

    def hang_up(self) -> None:
        """Close the connection; threads in the middle of a copy keep the mapping. Idempotent."""
        with self._lock:
            if not self._closed:
                self._hang_up()

    def close(self) -> None:
        """Close the connection and the mapping. Idempotent."""
        self.hang_up()
        self.arena.close()

    def _ask(self, request: protocol.Request, kind: type[A]) -> A:
        with self._lock:
            self._send(request)
            try:
                answer = protocol.decode_answer(_rest(self._connection, b""))
            except (OSError, StoreProtocolError) as error:
                self._hang_up()
                raise StoreUnavailableError(f"the store does not answer: {error}") from error
            if not isinstance(answer, kind):
                self._hang_up()
                reason = answer.reason if isinstance(answer, protocol.Refused) else str(answer)
                raise StoreUnavailableError(f"the store refused: {reason}")
            return answer

    def _tell(self, request: protocol.Request) -> None:
        with self._lock:
            self._send(request)

    def _send(self, request: protocol.Request) -> None:
        if self._closed:
            raise StoreUnavailableError("the connection to the store is closed")
        try:
            self._connection.sendall(protocol.frame(request))
        except OSError as error:
            self._hang_up()
            raise StoreUnavailableError(f"the store is gone: {error}") from error

    def _hang_up(self) -> None:
        # After a time-out an answer may still come; nobody could tell to which question.
        self._closed = True
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def _rest(connection: socket.socket, data: bytes) -> bytes:
    """The body of one frame, of which `data` has been read."""
    while len(data) < 4:
        data += _some(connection, 4 - len(data))
    length = protocol.frame_length(data[:4])
    body = data[4:]
    while len(body) < length:
        body += _some(connection, length - len(body))
    return body


def _some(connection: socket.socket, num_bytes: int) -> bytes:
    piece = connection.recv(num_bytes)
    if not piece:
        raise OSError("the store closed the connection")
    return piece

"""The store's end of its Unix socket: listening, and whole messages."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

from prefix_store import protocol
from prefix_store.base import StoreError, StoreProtocolError


class SocketInUseError(StoreError):
    """Another store serves this socket."""


def listen(path: Path) -> socket.socket:
    """A listening Unix socket. A socket file that nobody serves is replaced."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.setblocking(False)
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.exists():
            probe.settimeout(1.0)
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()
            else:
                raise SocketInUseError(
                    f"another store serves {path}; stop it or set store.socket to another path"
                )
        listener.bind(str(path))
        os.chmod(path, 0o600)
        listener.listen(64)
    except OSError as error:
        listener.close()
        raise StoreError(f"store.socket: cannot listen on {path}: {error.strerror}") from error
    except SocketInUseError:
        listener.close()
        raise
    finally:
        probe.close()
    return listener


async def receive(connection: socket.socket) -> protocol.Request | None:
    """The next request; None when the client has closed the connection between two messages."""
    header = await _read_exactly(connection, 4)
    if header is None:
        return None
    body = await _read_exactly(connection, protocol.frame_length(header))
    if body is None:
        raise StoreProtocolError("the connection ended in the middle of a message")
    return protocol.decode_request(body)


async def _read_exactly(connection: socket.socket, num_bytes: int) -> bytes | None:
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < num_bytes:
        piece = await loop.sock_recv(connection, num_bytes - len(data))
        if not piece:
            if data:
                raise StoreProtocolError("the connection ended in the middle of a message")
            return None
        data += piece
    return data


async def send(connection: socket.socket, answer: protocol.Answer) -> None:
    await asyncio.get_running_loop().sock_sendall(connection, protocol.frame(answer))

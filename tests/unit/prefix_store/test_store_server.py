"""Store server and client over a real Unix socket and a real shared arena."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from policies.config import HeadstartConfig
from prefix_store import protocol
from prefix_store.base import StoreError, StoreProtocolError, StoreUnavailableError
from prefix_store.client import StoreClient
from prefix_store.events import BlocksLoaded
from prefix_store.hashing import as_token_ids, extend_chain, routing_root
from prefix_store.link import StoreLink
from prefix_store.record import RecordShape, is_block, is_intact, payload, seal, write_header
from prefix_store.runtime_dir import RuntimePaths
from prefix_store.server import StoreServer

ROOT = routing_root("m", "s")
TOKENS = as_token_ids(range(64))
HASHES = extend_chain(ROOT, TOKENS, 32)
SHAPE = RecordShape(32, 10_000)

StartStore = Callable[[], Any]


def put(client: StoreClient) -> None:
    """Write two blocks through the shared memory."""
    places = client.reserve(ROOT, True, HASHES, SHAPE.num_bytes).places
    for i, place in enumerate(places):
        assert place is not None
        record = client.arena.view[place.offset : place.offset + SHAPE.num_bytes]
        block = TOKENS[32 * i : 32 * i + 32].tobytes()
        write_header(record, HASHES[i], HASHES[i - 1] if i else ROOT, block, SHAPE)
        payload(record, SHAPE)[:] = bytes([i + 1]) * 10_000
        seal(record, HASHES[i], SHAPE)
    client.commit([place.ticket for place in places if place is not None], "salt")


def until(condition: Callable[[], bool]) -> None:
    """One-way messages take a moment."""
    for _ in range(500):
        if condition():
            return
        time.sleep(0.01)
    pytest.fail("it did not happen within five seconds")


def test_one_client_reads_what_another_wrote(start_store: StartStore) -> None:
    """The bytes never cross the socket: both map the same memory."""
    store = start_store()
    writer = StoreClient.connect(store.socket, client="engine-0")
    put(writer)
    assert writer.match(HASHES, 2).num_blocks == 2
    writer.close()
    reader = StoreClient.connect(store.socket)
    matched = reader.match(HASHES, 0)
    assert matched.num_blocks == 2
    for i, offset in enumerate(matched.offsets):
        record = reader.arena.view[offset : offset + SHAPE.num_bytes]
        assert is_block(record, HASHES[i], TOKENS[32 * i : 32 * i + 32].tobytes(), SHAPE)
        assert is_intact(record, HASHES[i], SHAPE)
        assert payload(record, SHAPE)[0] == i + 1
        del record
    reader.close()


def test_stats_tell_what_happened(start_store: StartStore) -> None:
    """Connectors, blocks, leases, loads."""
    store = start_store()
    client = StoreClient.connect(store.socket, client="engine-7")
    client.serving()
    put(client)
    matched = client.match(HASHES, 1)
    stats = client.stats()
    assert stats.connectors == ["engine-7"]
    assert (stats.blocks, stats.leases, stats.leased_blocks) == (2, 1, 1)
    assert stats.used_bytes >= 2 * SHAPE.num_bytes
    client.release(matched.lease, BlocksLoaded("r", 32, 32, 10_000, 0.001))
    client.drop(HASHES[1])
    until(lambda: client.stats().leases == 0)
    stats = client.stats()
    assert (stats.loads, stats.tokens_loaded, stats.bytes_loaded) == (1, 32, 10_000)
    assert stats.evictions == {"corrupt": 1}
    assert client.clear() == 1
    client.close()


def test_the_arena_outlives_the_store(start_store: StartStore) -> None:
    """An engine in the middle of a copy keeps its bytes when the store dies."""
    store = start_store()
    client = StoreClient.connect(store.socket)
    put(client)
    (offset, _) = client.match(HASHES, 0).offsets
    store.stop()
    record = client.arena.view[offset : offset + SHAPE.num_bytes]
    assert is_intact(record, HASHES[0], SHAPE)
    del record
    with pytest.raises(StoreUnavailableError):
        client.match(HASHES, 0)
    assert client.closed
    client.close()


def test_a_stopped_store_leaves_no_files(start_store: StartStore) -> None:
    """Socket and event endpoints are gone; the memory has no name."""
    store = start_store()
    store.stop()
    assert list(store.paths.root.iterdir()) == []


def test_a_stale_socket_is_replaced_and_a_live_one_is_not(
    start_store: StartStore, tmp_path: Path
) -> None:
    """A crash leaves a socket file; a second store must not steal a live one."""
    (tmp_path / "rt").mkdir()
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(tmp_path / "rt" / "store.sock"))
    stale.close()
    store = start_store()
    config = HeadstartConfig(runtime_dir=str(tmp_path / "rt"))
    second = StoreServer(config, RuntimePaths.of(config))
    import asyncio

    with pytest.raises(StoreError, match="another store serves"):
        asyncio.run(second.run())
    StoreClient.connect(store.socket).close()


def test_no_store_is_said_plainly(tmp_path: Path) -> None:
    """With the command that would start one."""
    with pytest.raises(StoreUnavailableError, match="headstart store"):
        StoreClient.connect(tmp_path / "none.sock")


@pytest.mark.parametrize(
    "garbage",
    [b"\xff\xff\xff\xff", b"\x03\x00\x00\x00abc", b"\x05\x00\x00\x00\x92\xa3Foo", b"\x01"],
)
def test_garbage_ends_one_connection_only(start_store: StartStore, garbage: bytes) -> None:
    """Too long, not msgpack, unknown, torn: the server goes on."""
    store = start_store()
    broken = socket.socket(socket.AF_UNIX)
    broken.connect(str(store.socket))
    broken.sendall(garbage)
    broken.shutdown(socket.SHUT_WR)
    broken.settimeout(5)
    while broken.recv(4096):
        pass
    broken.close()
    StoreClient.connect(store.socket).close()


def test_another_protocol_version_is_refused_with_a_reason(
    start_store: StartStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two releases on one host say so."""
    store = start_store()
    monkeypatch.setattr(protocol, "VERSION", 99)
    client = protocol.frame(protocol.Hello(98, "old engine"))
    raw = socket.socket(socket.AF_UNIX)
    raw.connect(str(store.socket))
    raw.sendall(client)
    answer = protocol.decode_answer(raw.recv(4096)[4:])
    assert isinstance(answer, protocol.Refused)
    assert "same release" in answer.reason
    raw.close()
    with pytest.raises(StoreProtocolError):
        protocol.split_hashes(b"123")


def test_a_store_that_does_not_answer_is_given_up_after_the_time_out(tmp_path: Path) -> None:
    """The next call fails at once: nobody waits twice on one connection."""
    path = tmp_path / "s.sock"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    import threading

    from prefix_store.arena import Arena

    arena = Arena.create(1 << 20)

    def welcome_only() -> None:
        connection, _ = listener.accept()
        connection.recv(4096)
        answer = protocol.Welcome(protocol.VERSION, "s", 1, arena.num_bytes, 30.0, True)
        socket.send_fds(connection, [protocol.frame(answer)], [arena.fd])
        done.wait(10)
        connection.close()

    done = threading.Event()
    thread = threading.Thread(target=welcome_only)
    thread.start()
    client = StoreClient.connect(path, timeout_s=0.05)
    with pytest.raises(StoreUnavailableError, match="does not answer"):
        client.match(HASHES, 0)
    with pytest.raises(StoreUnavailableError, match="closed"):
        client.match(HASHES, 0)
    done.set()
    thread.join()
    client.close()
    arena.close()
    listener.close()


def test_a_link_finds_a_store_that_comes_later_and_one_that_comes_back(
    start_store: StartStore, tmp_path: Path
) -> None:
    """Engines start before stores, and outlive them."""
    link = StoreLink(tmp_path / "rt" / "store.sock", "engine-0")
    link.wait_first_try(5)
    assert link.client() is None
    store = start_store()
    until(lambda: link.client() is not None)
    first = link.client()
    assert first is not None
    store.stop()
    until(lambda: link.client() is None)
    start_store()
    until(lambda: link.client() is not None)
    second = link.client()
    assert second is not None
    assert second.welcome.incarnation != first.welcome.incarnation
    link.close()


def test_a_long_reason_for_refusing_a_configuration_is_cut(start_store: Any) -> None:
    """A file may have a mistake in each of its lines; the statistics stay small."""
    client = StoreClient.connect(start_store().socket, timeout_s=5)
    client.reload_refused("x" * 1_000_000)
    policies = client.stats().policies
    assert (policies.error, policies.refused) == ("x" * protocol.MAX_REASON_CHARS, 1)
    client.close()

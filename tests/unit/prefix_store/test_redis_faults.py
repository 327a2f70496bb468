"""The Redis tier's backend when Redis is killed, paused, full, slow, closed to us or a cluster."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme
from redis_blocks import chain, hashes_of, read_back, redis_backend
from redis_server import RedisCluster, RedisServer, installed_servers
from slow_proxy import SlowProxy
from waiting import until

from prefix_store.base import StoreError, StoreUnavailableError
from prefix_store.redis_backend import RedisBackend

SHORT_S = 0.15

ANY_SERVER = pytest.mark.parametrize("binary", list(installed_servers())[:1], indirect=True)
"""For what our side of the connection does: one kind of server shows it."""


@pytest.fixture(params=["redis", "valkey"])
def binary(request: pytest.FixtureRequest) -> Path:
    servers = installed_servers()
    if request.param not in servers:
        pytest.skip(f"no {request.param} server for this Python")
    return servers[request.param]


@pytest.fixture
def server(binary: Path) -> Iterator[RedisServer]:
    """Of this test alone."""
    server = RedisServer(binary)
    yield server
    server.close()


async def test_a_killed_server_is_a_miss_and_is_found_again(server: RedisServer) -> None:
    """Nothing raises; after some faults nobody waits for it; a restart is noticed without help."""
    records = chain(4)
    async with redis_backend(server.url) as backend:
        assert all(await backend.write(records))
        server.kill()
        for _ in range(4):
            assert await backend.count(hashes_of(records)) == 0
            assert await read_back(backend, records) == [False] * 4
            assert await backend.write(records) == [False] * 4
        await backend.remove(hashes_of(records[3:]))
        assert backend.breaker != "closed"
        assert backend.counters.breaker_openings == 1
        faults = backend.faults
        assert await backend.count(hashes_of(records)) == 0
        assert backend.faults == faults
        assert backend.counters.calls_while_open > 0
        server.start()
        await until(lambda: backend.breaker == "closed")
        assert await backend.count(hashes_of(records)) == 0
        assert all(await backend.write(records))
        assert all(await read_back(backend, records))


@ANY_SERVER
async def test_a_paused_server_costs_milliseconds_and_answers_are_never_mixed_up(
    server: RedisServer,
) -> None:
    """Late answers to what was given up are not taken for those of the next question."""
    records = chain(8, payload_bytes=50_000)
    async with redis_backend(server.url, timeout_s=SHORT_S) as backend:
        assert all(await backend.write(records))
        server.pause()
        began = time.monotonic()
        for _ in range(6):
            assert await backend.count(hashes_of(records)) == 0
            assert await read_back(backend, records) == [False] * 8
        assert backend.counters.timeouts == 3  # the breaker is open since
        waited_s = time.monotonic() - began
        assert waited_s < 60  # not a time-out for each of them; generous: a busy machine
        server.resume()
        await until(lambda: backend.breaker == "closed")
        for _ in range(3):
            assert await backend.count(hashes_of(records)) == 8
            assert all(await read_back(backend, records))
            assert await read_back(backend, records[5:]) == [True] * 3


@ANY_SERVER
async def test_what_was_under_way_when_it_broke_does_not_stay_uncounted(
    server: RedisServer,
) -> None:
    """A write whose answer never came is taken back once the server answers again."""
    records = chain(6, payload_bytes=20_000)
    async with redis_backend(server.url, timeout_s=SHORT_S, linger_s=0.5) as backend:
        assert all(await backend.write(records[:2]))
        server.pause()
        assert await backend.write(records[2:]) == [False] * 4
        server.resume()
        await until(lambda: server.call("HLEN", "hs1:refs:store") == 2)
        keys = server.call("KEYS", "hs1:b:*")
        assert isinstance(keys, list)
        assert len(keys) == 2
        assert all(await read_back(backend, records[:2]))


async def test_a_full_server_refuses_and_the_rest_goes_on(binary: Path) -> None:
    """maxmemory with noeviction: not written, counted, no circuit breaker, no leftovers."""
    server = RedisServer(binary, ["--maxmemory", "8mb", "--maxmemory-policy", "noeviction"])
    try:
        async with redis_backend(server.url) as backend:
            records = chain(30, payload_bytes=500_000)
            written = await backend.write(records)
            assert written[0]
            assert not written[-1]
            assert backend.counters.writes_full > 0
            assert backend.breaker == "closed"
            assert await read_back(backend, records) == written
            await until(lambda: server.call("HLEN", "hs1:refs:store") == sum(written))
            await backend.remove(hashes_of(records))
            assert server.call("DBSIZE") == 0
            assert all(await backend.write(chain(3, payload_bytes=500_000, seed=9)))
    finally:
        server.close()


async def test_a_server_that_evicts_by_itself_is_a_miss(binary: Path) -> None:
    """Whatever it threw away, the references too: what is read is right or not there."""
    server = RedisServer(binary, ["--maxmemory", "6mb", "--maxmemory-policy", "allkeys-random"])
    try:
        async with redis_backend(server.url) as backend:
            records = chain(40, payload_bytes=300_000)
            await backend.write(records)
            there = await read_back(backend, records)
            assert any(there)
            assert not all(there)
            assert backend.counters.records_damaged == 0
        async with redis_backend(server.url) as again:
            await read_back(again, records)
    finally:
        server.close()


@ANY_SERVER
async def test_a_slow_link_is_not_cut_off(server: RedisServer) -> None:
    """5 MB/s: a transfer takes far longer than a look-up may, and still ends well."""
    proxy = SlowProxy(server.port, bytes_per_s=5_000_000)
    try:
        async with redis_backend(proxy.url, timeout_s=1.0) as backend:
            records = chain(3, payload_bytes=1_000_000)
            assert all(await backend.write(records))
            assert all(await read_back(backend, records))
            assert backend.faults == 0
    finally:
        proxy.close()


async def test_a_user_with_rights_on_our_keys_only_is_enough(server: RedisServer) -> None:
    """The commands that the documentation names, on keys with the prefix."""
    rights = "+hscan +hset +hdel +get +set +getrange +strlen +exists +pexpire +unlink +ping"
    server.call("ACL", "SETUSER", "tier", "on", ">s3cret", "~hs1:*", *rights.split())
    records = chain(3)
    async with redis_backend(f"redis://tier:s3cret@127.0.0.1:{server.port}/0") as backend:
        assert all(await backend.write(records))
        assert all(await backend.write(records))
        assert await backend.count(hashes_of(records)) == 3
        assert all(await read_back(backend, records))
        await backend.remove(hashes_of(records[2:]))
        assert backend.faults == 0


async def test_missing_rights_are_told_without_the_password(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says which key of the configuration to look at."""
    server.call("ACL", "SETUSER", "tier", "on", ">s3cret", "~other:*", "+@all")
    caplog.set_level(logging.DEBUG)
    for user in ("tier:s3cret", "tier:wr0ng"):
        backend = RedisBackend(f"redis://{user}@127.0.0.1:{server.port}/0", "a", timeout_s=5)
        with pytest.raises(StoreError, match=r"store\.redis\.url"):
            await backend.recover()
        assert await backend.write(chain(1)) == [False]
        await backend.close()
    assert "may not do this" in caplog.text
    assert "refuses user or password" in caplog.text
    assert "s3cret" not in caplog.text
    assert "wr0ng" not in caplog.text


@ANY_SERVER
async def test_a_backend_recovers_later_when_redis_was_not_there(server: RedisServer) -> None:
    """Until then nothing is written; the second try takes over what is there."""
    records = chain(2)
    async with redis_backend(server.url) as first:
        assert all(await first.write(records))
    server.pause()
    backend = RedisBackend(server.url, "store", timeout_s=SHORT_S)
    with pytest.raises(StoreError):
        await backend.recover()
    assert await backend.write(records) == [False, False]
    server.resume()
    await until(lambda: backend.breaker == "closed")
    assert await backend.recover() == [record.block for record in records]
    assert all(await backend.write(records))
    await backend.close()


@ANY_SERVER
async def test_tls_is_checked_and_works(server: RedisServer, tmp_path: Path) -> None:
    """By URL: with the authority's certificate it works, without it the server is refused."""
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    certificate = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(certificate))
    proxy = SlowProxy(server.port, tls=context)
    records = chain(4, payload_bytes=300_000)
    try:
        async with redis_backend(f"{proxy.url}?ssl_ca_certs={certificate}") as backend:
            assert all(await backend.write(records))
            assert all(await read_back(backend, records))
            assert backend.faults == 0
        stranger = RedisBackend(proxy.url, "a", timeout_s=5)
        with pytest.raises(StoreError):
            await stranger.recover()
        await stranger.close()
    finally:
        proxy.close()


@ANY_SERVER
async def test_a_unix_socket_works(binary: Path, tmp_path: Path) -> None:
    """unix:// in the URL."""
    path = tmp_path / "redis.sock"
    server = RedisServer(binary, ["--unixsocket", str(path)])
    try:
        async with redis_backend(f"unix://{path}") as backend:
            records = chain(2)
            assert all(await backend.write(records))
            assert all(await read_back(backend, records))
    finally:
        server.close()


@pytest.mark.parametrize("scheme", ["redis", "redis+cluster"])
async def test_a_server_that_is_away_at_the_start_is_no_fault_of_the_store(
    scheme: str,
) -> None:
    """It is looked for again later, and the probing does not die of it."""
    backend = RedisBackend(f"{scheme}://127.0.0.1:1", "s", timeout_s=0.05)
    try:
        with pytest.raises(StoreUnavailableError):
            await backend.recover()
        healing = backend._link._healing
        await asyncio.sleep(0.5)
        assert healing is None or not healing.done()
    finally:
        await backend.close()


@pytest.mark.parametrize(
    "url",
    [
        "redis://h?foo=1",
        "redis+cluster://h?foo=1",
        "redis://h:99999",
        "redis://h:x",
        "redis://h?db=x",
    ],
)
def test_an_impossible_url_is_refused_at_the_start(url: str) -> None:
    """Not at the first round, and without the password."""
    with pytest.raises(StoreError, match=r"store\.redis\.url is not usable"):
        RedisBackend(url, "s", timeout_s=0.05)


# When it looks for the nodes anew, redis-py drops those that it knew without closing them: their
# sockets are closed by the garbage collector, now and then within this test.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_a_cluster_keeps_blocks_on_all_its_nodes(
    binary: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The same calls. While a node is gone all is a miss: hardly any prefix would be whole."""
    cluster = RedisCluster(binary)
    try:
        records = chain(60, payload_bytes=1000)
        async with redis_backend(cluster.url, timeout_s=2) as backend:
            assert all(await backend.write(records))
            assert await backend.count(hashes_of(records)) == 60
            assert all(await read_back(backend, records))
            assert all(cluster.nodes[i].call("DBSIZE") for i in range(3))
            await backend.remove(hashes_of(records[40:]))
            assert await backend.count(hashes_of(records)) == 40
            assert backend.faults == 0
        await plain_url_is_explained(cluster, caplog)
        async with redis_backend(cluster.url, timeout_s=2) as again:
            assert again.counters.records_recovered == 40
            cluster.nodes[1].kill()
            for _ in range(4):
                assert await again.count(hashes_of(records)) < 40
            assert await again.write(records[40:]) == [False] * 20
            assert again.breaker != "closed"
            cluster.nodes[1].start()
            await until(lambda: again.breaker == "closed")
    finally:
        cluster.close()


async def plain_url_is_explained(cluster: RedisCluster, caplog: pytest.LogCaptureFixture) -> None:
    """The log says how to write the URL of a cluster."""
    backend = RedisBackend(cluster.nodes[0].url, "stranger", timeout_s=5)
    with contextlib.suppress(StoreError):
        await backend.recover()
    assert not all(await backend.write(chain(30, seed=3)))
    await backend.close()
    assert "redis+cluster://" in caplog.text

"""The Redis tier's backend beyond the contract of all backends: sharing, references, expiry."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from redis_blocks import chain, hashes_of, read_back, redis_backend
from redis_server import RedisServer, installed_servers
from waiting import until

from prefix_store.base import StoreError
from prefix_store.redis_backend import RedisBackend

ANY_SERVER = pytest.mark.parametrize("running", list(installed_servers())[:1], indirect=True)
"""For what stores do among themselves: one kind of server shows it."""


@pytest.fixture(scope="module", params=["redis", "valkey"])
def running(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    servers = installed_servers()
    if request.param not in servers:
        pytest.skip(f"no {request.param} server for this Python")
    server = RedisServer(servers[request.param])
    yield server
    server.close()


@pytest.fixture
def server(running: RedisServer) -> RedisServer:
    """Empty."""
    running.call("FLUSHALL")
    return running


def references(server: RedisServer, store_id: str) -> set[bytes]:
    found = server.call("HKEYS", f"hs1:refs:{store_id}")
    assert isinstance(found, list)
    return set(found)


def signed_blocks(server: RedisServer) -> set[bytes]:
    keys = server.call("KEYS", "hs1:b:*")
    assert isinstance(keys, list)
    return {bytes.fromhex(key.removeprefix(b"hs1:b:").decode()) for key in keys}


async def test_stores_read_what_others_wrote(server: RedisServer) -> None:
    """A store that starts empty on a warm Redis serves from it."""
    records = chain(5)
    async with redis_backend(server.url, "a") as a, redis_backend(server.url, "b") as b:
        assert all(await a.write(records))
        assert await b.count(hashes_of(records)) == 5
        assert all(await read_back(b, records))


async def test_a_block_of_another_store_is_kept_by_its_writer(server: RedisServer) -> None:
    """A second writer refers to it, finds it again at its start, and cannot remove it."""
    records = chain(3)
    async with redis_backend(server.url, "a") as a:
        assert all(await a.write(records))
        async with redis_backend(server.url, "b") as b:
            assert all(await b.write(records))
            assert b.counters.records_written == 0
            assert b.counters.records_found == 3
        async with redis_backend(server.url, "b") as b:
            recovered = await RedisBackend.recover(b)
            assert recovered == [record.block for record in records]
            await b.remove(hashes_of(records))
            assert references(server, "b") == set()
        assert all(await read_back(a, records))
        await a.remove(hashes_of(records))
        assert signed_blocks(server) == references(server, "a") == set()


async def test_concurrent_writers_of_one_block_are_harmless(server: RedisServer) -> None:
    """Each of them has it afterwards, and the bytes are right."""
    records = chain(20)
    async with redis_backend(server.url, "a") as a, redis_backend(server.url, "b") as b:
        answers = await asyncio.gather(a.write(records), b.write(records), a.write(records))
        assert all(map(all, answers))
        assert all(await read_back(b, records))
        assert a.counters.records_written + b.counters.records_written == 20


@ANY_SERVER
async def test_what_a_killed_store_has_written_is_known_at_its_start(server: RedisServer) -> None:
    """Wherever a write is broken off, every block in Redis is referred to, and comes back."""
    records = chain(40, payload_bytes=100_000)
    for turns in range(0, 40, 5):
        server.call("FLUSHALL")
        doomed = RedisBackend(server.url, "a", timeout_s=5)
        await doomed.recover()
        writing = asyncio.create_task(doomed.write(records))
        for _ in range(turns):
            await asyncio.sleep(0)
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        assert doomed._keeping is not None
        doomed._keeping.cancel()
        await doomed._link.close()  # killed: it never gets to tidy up
        await asyncio.sleep(0.05)  # what was sent is carried out
        assert signed_blocks(server) <= references(server, "a")
        async with redis_backend(server.url, "a") as again:
            there = await read_back(again, records)
            assert references(server, "a") == {
                h for h, ok in zip(hashes_of(records), there, strict=True) if ok
            }


@ANY_SERVER
async def test_a_write_of_unknown_outcome_is_taken_back(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody counts such blocks, so they must not stay, even if they arrive late."""
    monkeypatch.setattr("prefix_store.redis_backend.SWEEP_EVERY_S", 0.1)
    async with redis_backend(server.url, "a", linger_s=0.5) as backend:
        kept = chain(3)
        assert all(await backend.write(kept))
        expected = set(hashes_of(kept))
        for turns in range(1, 41, 8):
            records = chain(60, payload_bytes=100_000, seed=turns)
            writing = asyncio.create_task(backend.write(records))
            for _ in range(turns):
                await asyncio.sleep(0)
            writing.cancel()
            (outcome,) = await asyncio.gather(writing, return_exceptions=True)
            if isinstance(outcome, list):  # it was faster
                expected.update(hashes_of(records))
            assert signed_blocks(server) <= references(server, "a")
        await until(lambda: references(server, "a") == expected)
        assert signed_blocks(server) == expected


@ANY_SERVER
async def test_a_late_write_may_be_written_again_meanwhile(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts from then on, and nobody takes it back any more."""
    monkeypatch.setattr("prefix_store.redis_backend.SWEEP_EVERY_S", 0.1)
    async with redis_backend(server.url, "a", linger_s=0.3) as backend:
        records = chain(30, payload_bytes=100_000)
        writing = asyncio.create_task(backend.write(records))
        for _ in range(25):
            await asyncio.sleep(0)
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        assert all(await backend.write(records))
        await asyncio.sleep(0.7)  # twice as long as such writes are taken back
        assert all(await read_back(backend, records))


async def test_blocks_live_as_long_as_a_store_that_refers_to_them(server: RedisServer) -> None:
    """While it runs their lives are prolonged again and again; without it they end."""
    records = chain(3)
    keys = [f"hs1:b:{block_hash.hex()}" for block_hash in hashes_of(records)]
    async with redis_backend(server.url, "a", ttl_s=4) as a:
        assert all(await a.write(records))
        for _ in range(2):
            for key in keys:
                server.call("PEXPIRE", key, 3_600_000)
            await until(lambda: all(0 < lifetime_ms(server, key) <= 4000 for key in keys))
        assert 4000 < lifetime_ms(server, "hs1:refs:a") <= 8000
    assert all(0 < lifetime_ms(server, key) <= 4000 for key in keys)


def lifetime_ms(server: RedisServer, key: str) -> int:
    answer = server.call("PTTL", key)
    assert isinstance(answer, int)
    return answer


async def test_redis_needs_no_more_memory_than_was_counted(server: RedisServer) -> None:
    """`size_of` covers key, padding and the reference."""
    async with redis_backend(server.url) as backend:
        for payload_bytes in (0, 1000, 20_000, 2**17, 2**20, 1_200_000):
            records = chain(10, payload_bytes, seed=payload_bytes)
            assert all(await backend.write(records))
            key = f"hs1:b:{records[3].block.block_hash.hex()}"
            used = server.call("MEMORY", "USAGE", key)
            assert isinstance(used, int)
            assert used + 60 <= records[3].block.num_bytes
            await backend.remove(hashes_of(records))


async def test_keys_carry_no_salt(server: RedisServer) -> None:
    """Names of keys show up in monitoring."""
    async with redis_backend(server.url) as backend:
        assert all(await backend.write(chain(2)))
        keys = server.call("KEYS", "*")
        assert isinstance(keys, list)
        assert len(keys) == 3
        assert not any(b"tenant" in key for key in keys)


async def test_one_round_trip_per_match(server: RedisServer) -> None:
    """However long the prefix is."""
    records = chain(300, payload_bytes=10)
    async with redis_backend(server.url) as backend:
        assert all(await backend.write(records))
        rounds = 0
        original = backend._link.round

        async def counted(*args: object, **more: object) -> object:
            nonlocal rounds
            rounds += 1
            return await original(*args, **more)  # type: ignore[arg-type]

        backend._link.round = counted  # type: ignore[method-assign, assignment]
        assert await backend.count(hashes_of(records)) == 300
        assert rounds == 1


@ANY_SERVER
async def test_recovery_goes_through_many_blocks_in_parts(server: RedisServer) -> None:
    """More than fit into one answer of the server."""
    records = [record for seed in range(60) for record in chain(20, payload_bytes=5, seed=seed)]
    async with redis_backend(server.url) as backend:
        assert all(await backend.write(records))
    backend = RedisBackend(server.url, "store", timeout_s=5)
    recovered = await backend.recover()
    assert {block.block_hash for block in recovered} == set(hashes_of(records))
    assert backend.counters.records_recovered == 1200
    await backend.close()


@ANY_SERVER
async def test_prefixes_keep_uses_of_one_server_apart(server: RedisServer) -> None:
    """Two installations on one Redis."""
    records = chain(2)
    one = RedisBackend(server.url, "a", timeout_s=5, prefix="one")
    two = RedisBackend(server.url, "a", timeout_s=5, prefix="two")
    for backend in (one, two):
        assert await backend.recover() == []
    assert all(await one.write(records))
    assert await two.count(hashes_of(records)) == 0
    await one.close()
    await two.close()


@pytest.mark.parametrize(
    "url", ["http://x", "redis://127.0.0.1:1/?socket_timeout=x", "redis://127.0.0.1:port/"]
)
async def test_an_impossible_url_is_refused(url: str) -> None:
    """In words that name the key of the configuration."""
    with pytest.raises(StoreError, match=r"store\.redis\.url"):
        RedisBackend(url, "a")

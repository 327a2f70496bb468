"""The composition root: what it makes from a configuration, and how it ends on a signal."""

from __future__ import annotations

import asyncio
import json
import os
import signal

import aiohttp
import pytest

from engine_adapter.base import RenderingError
from engine_adapter.rendering import PromptRenderer
from gateway import serve as root
from gateway.accounts.record import Outcome
from gateway.accounts.stats_schema import CacheStats
from gateway.serve import serve
from gateway.settings.user_error import UserError
from policies.config import HeadstartConfig


@pytest.fixture
def no_tokenizer(monkeypatch):
    """A model that cannot be rendered: everything is forwarded."""

    def load(*_args, **_kwargs):
        raise RenderingError("no tokenizer here")

    monkeypatch.setattr(PromptRenderer, "load", load)


@pytest.fixture
def configure(tmp_path, monkeypatch, unused_port):
    """A configuration whose state, sockets and ports are this test's own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def make(engine_url: str, **more) -> HeadstartConfig:
        return HeadstartConfig.model_validate(
            {
                "listen": f"127.0.0.1:{unused_port}",
                "runtime_dir": str(tmp_path / "rt"),
                "model": {"name": "stub-model", "path": str(tmp_path)},
                "engines": [{"url": engine_url}],
                **more,
            }
        )

    return make


@pytest.fixture
def unused_port() -> int:
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
    return port


async def start(config: HeadstartConfig) -> asyncio.Task[None]:
    """Serve in a task, ready."""
    ready = asyncio.Event()
    task = asyncio.create_task(serve(config, ready=ready.set))
    waiting = asyncio.create_task(ready.wait())
    await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if task.done():
        task.result()
    return task


async def stopped_listening(config: HeadstartConfig) -> None:
    """Until the gateway has noticed a signal."""
    async with asyncio.timeout(10):
        while True:
            try:
                _, writer = await asyncio.open_connection(config.host, config.port)
            except ConnectionRefusedError:
                return
            writer.close()
            await asyncio.sleep(0.001)


async def stats_after(client: aiohttp.ClientSession, ended: int) -> CacheStats:
    """A record waits a moment for the report of a load that may have been."""
    async with asyncio.timeout(10):
        while True:
            async with client.get("/cache/stats") as response:
                stats = CacheStats.model_validate_json(await response.read())
            if stats.total.windows.since_start.requests.total == ended:
                return stats
            await asyncio.sleep(0.01)


async def test_a_request_shows_in_the_statistics(stub_engine, configure, no_tokenizer):
    """All routes are wired; the store does not answer and that is said."""
    kit = stub_engine
    async with kit.open_gateway(kit.answers(kit.WHOLE)) as upstream:
        config = configure(upstream.stub.url)
        task = await start(config)
        async with aiohttp.ClientSession(f"http://{config.listen}") as client:
            async with client.post("/v1/chat/completions", json=kit.chat()) as response:
                assert response.status == 200
            async with client.get("/readyz") as response:
                assert response.status == 200
            stats = await stats_after(client, ended=1)
            async with client.get("/metrics") as response:
                assert 'replica="engine-0"' in await response.text()
        assert stats.replicas["engine-0"].windows.since_start.requests.ok == 1
        assert stats.total.windows.since_start.unrendered_prompts == 1
        assert stats.store is None
        assert stats.memo is None
        os.kill(os.getpid(), signal.SIGTERM)
        await task


async def test_the_request_log_is_written_where_it_is_asked_for(
    stub_engine, configure, no_tokenizer, tmp_path
):
    """And complete when serve returns; without a store nobody is told of outcomes."""
    kit = stub_engine
    path = tmp_path / "log" / "requests.jsonl"
    async with kit.open_gateway(kit.answers(kit.WHOLE)) as upstream:
        config = configure(upstream.stub.url, store=None, request_log={"path": str(path)})
        task = await start(config)
        async with aiohttp.ClientSession(f"http://{config.listen}") as client:
            async with client.post("/v1/chat/completions", json=kit.chat()) as response:
                assert response.status == 200
            stats = await stats_after(client, ended=1)
        os.kill(os.getpid(), signal.SIGTERM)
        await task
    assert stats.outcomes is None
    assert stats.request_log is not None
    assert stats.request_log.done + stats.request_log.waiting <= 1
    (line,) = path.read_text().splitlines()
    assert json.loads(line)["input_length"] == kit.NUM_TOKENS


async def test_a_request_log_that_cannot_be_written_is_a_mistake_of_the_configuration(
    stub_engine, configure, no_tokenizer, tmp_path
):
    """Known before anything is served."""
    config = configure("http://127.0.0.1:1", request_log={"path": str(tmp_path)})
    with pytest.raises(UserError, match=r"request_log\.path"):
        await serve(config)


async def test_sigterm_lets_answers_end(stub_engine, configure, no_tokenizer):
    """The stream completes, then serve returns."""
    kit = stub_engine
    async with kit.open_gateway(kit.streams_then_hangs(kit.STREAM[:2])) as upstream:
        config = configure(upstream.stub.url, store=None)
        task = await start(config)
        async with aiohttp.ClientSession(f"http://{config.listen}") as client:
            body = kit.chat(stream=True)
            async with client.post("/v1/chat/completions", json=body) as response:
                os.kill(os.getpid(), signal.SIGTERM)
                await stopped_listening(config)
                upstream.stub.release.set()
                assert (await response.read()).endswith(kit.DONE)
        await task


async def test_a_second_signal_ends_at_once(stub_engine, configure, no_tokenizer):
    """Whoever presses Ctrl-C twice means it."""
    kit = stub_engine
    async with kit.open_gateway(kit.streams_then_hangs(kit.STREAM[:2])) as upstream:
        config = configure(upstream.stub.url, store=None, limits={"drain_timeout": 600})
        task = await start(config)
        async with (
            aiohttp.ClientSession(f"http://{config.listen}") as client,
            client.post("/v1/chat/completions", json=kit.chat(stream=True)) as response,
        ):
            os.kill(os.getpid(), signal.SIGINT)
            await stopped_listening(config)
            os.kill(os.getpid(), signal.SIGINT)
            async with asyncio.timeout(10):
                await task
            with pytest.raises(aiohttp.ClientError):
                await response.read()
        await upstream.settled()
        assert upstream.stub.aborted == 1


async def test_cancelling_serve_closes_everything(stub_engine, configure, no_tokenizer):
    """For callers that have other children to look after."""
    kit = stub_engine
    async with kit.open_gateway(kit.answers(kit.WHOLE)) as upstream:
        config = configure(upstream.stub.url)
        task = await start(config)
        before = len(asyncio.all_tasks())
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(asyncio.all_tasks()) < before
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(config.host, config.port)


async def test_an_address_in_use_is_the_users_to_mend(configure, no_tokenizer, unused_port):
    """One sentence that names the key."""
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", unused_port)
    try:
        with pytest.raises(UserError, match="listen: "):
            await serve(configure("http://127.0.0.1:9"))
    finally:
        server.close()


async def test_block_sizes_must_be_equal(configure, no_tokenizer):
    """Blocks of different sizes have different hashes."""
    engines = [{"id": "a", "block_size": 32}, {"id": "b", "block_size": 64}]
    with pytest.raises(UserError, match="block_size"):
        await serve(configure("", engines=engines))


async def test_work_goes_on_until_it_is_hurried():
    """And its failure is not swallowed."""

    async def fails() -> None:
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError):
        await root._unless(asyncio.Event(), fails())
    hurry = asyncio.Event()
    hurry.set()
    await root._unless(hurry, asyncio.sleep(600))


def test_outcomes_are_the_statistics_names():
    """The record and the schema speak of the same things."""
    assert {str(outcome) for outcome in Outcome} == {"ok", "cancelled", "refused", "engine_error"}

"""Simulated engines as processes see them: faults, restarts, adapters, options, command line."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from waiting import until

from engine_adapter.engine_gauges import EngineGauges
from engine_adapter.event_subscriber import EventSubscriber
from engine_adapter.rendering import PromptRenderer
from engine_adapter.simulated.command import main, words_for
from engine_adapter.simulated.engine import SimulatedEngine, running
from engine_adapter.simulated.options import OptionsError, SimulationOptions
from engine_adapter.simulated.words import HashedWords
from prefix_store.event_source import EventSource
from prefix_store.hashing import routing_root
from prefix_store.residency import Residency

PROMPT = list(range(500, 600))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Client:
    """Of one engine."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self._url = url
        self._session = session

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        async with self._session.post(self._url + path, json=body) as response:
            return response.status, await response.json()

    async def complete(self, **fields: Any) -> Any:
        body = {"model": "m", "prompt": PROMPT, "max_tokens": 2, **fields}
        status, answer = await self.post("/v1/completions", body)
        assert status == 200, answer
        return answer

    async def cached(self, **fields: Any) -> int:
        usage = (await self.complete(**fields))["usage"]
        cached: int = usage["prompt_tokens_details"]["cached_tokens"]
        return cached

    async def fault(self, kind: str, **fields: Any) -> None:
        assert await self.post("/simulate/fault", {"kind": kind, **fields}) == (
            200,
            {"success": True},
        )

    async def gauges(self) -> EngineGauges:
        async with self._session.get(self._url + "/metrics") as response:
            return EngineGauges.parse(await response.read())

    async def is_healthy(self) -> bool:
        timeout = aiohttp.ClientTimeout(total=0.2)
        try:
            async with self._session.get(self._url + "/health", timeout=timeout) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False


@contextlib.asynccontextmanager
async def one_engine(**options: Any) -> AsyncIterator[tuple[SimulatedEngine, Client]]:
    chosen = SimulationOptions("m", speed=20.0, **options)
    engine = SimulatedEngine(chosen, HashedWords(), host="127.0.0.1", port=free_port())
    async with aiohttp.ClientSession() as session, running([engine]):
        yield engine, Client(engine.url, session)


async def test_a_restart_is_another_engine(tmp_path: Path) -> None:
    """Its cache is empty, its events start again, it says another start time; and while it is
    away nobody listens."""
    endpoints = {"events": f"ipc://{tmp_path}/e", "replay": f"ipc://{tmp_path}/r"}
    residency = Residency(2**20)
    source = EventSource("e", residency, model="m", block_size=16)
    subscriber = EventSubscriber("e", endpoints["events"], endpoints["replay"], source)

    async def follows(blocks: int, incarnation: int) -> bool:
        state = subscriber.state()
        return (source.stats().blocks, state.incarnation) == (blocks, incarnation)

    async with one_engine(**endpoints) as (engine, client), asyncio.TaskGroup() as tasks:
        following = tasks.create_task(subscriber.run())
        before = await client.gauges()
        await client.complete()
        await until(lambda: follows(6, 1))
        await client.fault("restart", seconds=0.3)
        await until(lambda: _is(not engine.ready.is_set()))
        assert not await client.is_healthy()
        await until(client.is_healthy)
        assert engine.incarnations == 2
        assert (await client.gauges()).restarted_since(before)
        assert await client.cached(prompt=PROMPT[:50]) == 0
        await until(lambda: follows(3, 2))
        following.cancel()


async def _is(value: bool) -> bool:
    return value


async def test_a_hanging_engine_accepts_and_says_nothing() -> None:
    """Until it goes on; then what waited is answered."""
    async with one_engine() as (_, client):
        await client.fault("hang")
        assert not await client.is_healthy()
        waiting = asyncio.ensure_future(client.complete())
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await client.fault("none")
        assert (await waiting)["usage"]["completion_tokens"] == 2
        await until(client.is_healthy)


async def test_a_stalled_engine_looks_well_and_does_nothing() -> None:
    """Its gauges answer, and stand still."""
    async with one_engine() as (_, client):
        await client.fault("stall")
        waiting = asyncio.ensure_future(client.complete())

        async def is_running() -> bool:
            return (await client.gauges()).running == 1

        await until(is_running)
        before = await client.gauges()
        await asyncio.sleep(0.05)
        assert not (await client.gauges()).moved_since(before)
        assert not waiting.done()
        await client.fault("none")
        await waiting


async def test_a_failing_engine_answers_with_500() -> None:
    """In vLLM's envelope."""
    async with one_engine() as (_, client):
        await client.fault("fail")
        status, answer = await client.post("/v1/completions", {"prompt": "x"})
        assert (status, answer["error"]["type"]) == (500, "InternalServerError")
        assert not await client.is_healthy()
        await client.fault("none")
        await until(client.is_healthy)


async def test_a_slow_engine_says_so_in_its_metrics() -> None:
    """Its steps take longer, and real time is what it reports."""
    async with one_engine() as (_, client):
        usual = (await client.complete(cache_salt="1"))["metrics"]["time_to_first_token_ms"]
        await client.fault("slow", factor=5)
        slow = (await client.complete(cache_salt="2"))["metrics"]["time_to_first_token_ms"]
        assert slow == pytest.approx(5 * usual)


@pytest.mark.parametrize(
    "body", [{"kind": "sad"}, {}, {"kind": "slow", "factor": "x"}, {"kind": "slow", "factor": -1}]
)
async def test_unknown_faults_are_refused(body: dict[str, Any]) -> None:
    """Rather than ignored."""
    async with one_engine() as (_, client):
        status, _ = await client.post("/simulate/fault", body)
        assert status == 400


async def test_adapters_are_models_of_their_own() -> None:
    """Listed below the model, answered by their names, and cached apart."""
    async with one_engine(adapters=("a", "b")) as (engine, client), aiohttp.ClientSession() as http:
        async with http.get(f"{engine.url}/v1/models") as response:
            cards = (await response.json())["data"]
        assert [(card["id"], card["parent"]) for card in cards] == [
            ("m", None), ("a", "m"), ("b", "m"),
        ]  # fmt: skip
        assert [await client.cached(model=name) for name in ("m", "a", "b", "a")] == [0, 0, 0, 96]
        status, answer = await client.post("/v1/completions", {"model": "c", "prompt": "x"})
        assert status == 404
        assert "Valid aliases: m, a, b." in answer["error"]["message"]


async def test_answers_end_with_the_context_or_by_themselves() -> None:
    """At most as many tokens as fit; without a limit, a length that depends on the prompt."""
    async with one_engine(max_model_len=128) as (_, client):
        answer = await client.complete(max_tokens=500)
        assert answer["usage"]["total_tokens"] == 128
        assert answer["choices"][0]["finish_reason"] == "length"
        chat = {"model": "m", "messages": [{"role": "user", "content": "hello you"}]}
        _, first = await client.post("/v1/chat/completions", chat)
        _, again = await client.post("/v1/chat/completions", chat)
        assert first["choices"] == again["choices"]
        assert first["choices"][0]["finish_reason"] == "stop"


async def test_a_thousand_clients_that_leave_leave_nothing() -> None:
    """At any moment of streams and whole answers: nothing runs or waits, no block is used."""
    async with one_engine(max_sequences=8) as (engine, client):

        async def leave(i: int) -> None:
            async with contextlib.AsyncExitStack() as stack:
                session = await stack.enter_async_context(aiohttp.ClientSession())
                body = {"prompt": [i, *PROMPT], "max_tokens": 2000, "stream": i % 2 == 0}
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.002 * (i % 40)):
                        await Client(engine.url, session).post("/v1/completions", body)

        for start in range(0, 1000, 100):
            await asyncio.gather(*(leave(i) for i in range(start, start + 100)))

        async def is_idle() -> bool:
            gauges = await client.gauges()
            return (gauges.running, gauges.waiting, gauges.kv_free) == (0, 0, 1.0)

        await until(is_idle)


async def test_a_port_in_use_is_an_error() -> None:
    """Raised by whoever waits for the engine."""
    async with one_engine() as (engine, _):
        port = int(engine.url.rpartition(":")[2])
        again = SimulatedEngine(SimulationOptions("m"), HashedWords(), host="127.0.0.1", port=port)
        with pytest.RaisesGroup(OSError):
            async with running([again]):
                pass


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"events": "ipc:///x"}, "both endpoints"),
        ({"events": "tcp://127.0.0.1:5557", "replay": "tcp://*:5558"}, "only binds"),
        ({"speed": 0}, "positive"),
        ({"kv_tokens": 1000}, "max-model-len"),
        ({"tokens_per_wire_token": 20}, "max-model-len"),
    ],
)
def test_options_that_no_engine_could_have_are_refused(options: dict[str, Any], word: str) -> None:
    """With what to change."""
    with pytest.raises(OptionsError, match=word):
        SimulationOptions("m", **options)


async def test_with_a_model_prompts_are_rendered_as_the_gateway_renders_them(
    model_dir: Path,
) -> None:
    """The same token ids; and answers have text."""
    words = words_for(SimulationOptions("m", model_path=model_dir))
    renderer = PromptRenderer.load(model_dir, block_size=16, memo_bytes=2**20)
    with contextlib.closing(words), contextlib.closing(renderer):
        body = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
        root = routing_root("m", "")
        expected = (await renderer.chat(body, root)).token_ids
        assert (await words.chat(body)).tolist() == expected.tolist()
        tokens = await words.completion("the capital of France")
        assert words.text(tokens) == "the capital of France"
        assert max(words.answer_ids) < 49_152


def test_command_line_says_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    """In one line, with status 2."""
    assert main(["--ports", "1", "--model", "m", "--kv-tokens", "10"]) == 2
    assert "too few" in capsys.readouterr().err
    assert main(["--ports", "x", "--model", "m"]) == 2


def test_command_runs_several_replicas_until_it_is_told_to_end(tmp_path: Path) -> None:
    """One line when all of them listen; SIGTERM ends it with status 0."""
    ports = [free_port(), free_port()]
    command = [
        sys.executable, "-m", "engine_adapter.simulated", "--model", "m",
        "--ports", ",".join(map(str, ports)),
        "--events", f"ipc://{tmp_path}/{{index}}-events",
        "--replay", f"ipc://{tmp_path}/{{port}}-replay",
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.split() == ["simulated", "engines:", *(f"http://127.0.0.1:{p}" for p in ports)]
        assert {path.name for path in tmp_path.iterdir()} == {
            "0-events", "1-events", f"{ports[0]}-replay", f"{ports[1]}-replay",
        }  # fmt: skip
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(20) == 0
    assert list(tmp_path.iterdir()) == []

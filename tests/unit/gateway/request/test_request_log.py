"""The request log: what stands in it, and what does not."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from engine_adapter.base import Prompt
from gateway.accounts.record import Outcome
from gateway.request.answer import PromptTokensDetails, Usage
from gateway.request.call import Call
from gateway.request.log_file import LogFile
from gateway.request.request_log import RequestLog, keyed
from gateway.settings.user_error import UserError
from policies.access import Stop
from policies.config import RequestLogConfig
from prefix_store.hashing import as_token_ids, extend_chain, routing_root
from prefix_store.protocol import Facts
from prefix_store.simulation.trace import read_trace

BLOCK = 32
SALT = "s" * 43
CHAIN = extend_chain(routing_root("m", SALT), as_token_ids(list(range(3 * BLOCK))), BLOCK)


def call_of(**more: Any) -> Call:
    facts = Facts("acme", "m", "my secret session", "my secret prefix", 4, 100)
    fields: dict[str, Any] = {
        "tenant": "acme",
        "salt": SALT,
        "model": "m",
        "started_at": 1_700_000_000.5,
        "began": 10.0,
        "sent": 10.001,
        "first_token": 10.25,
        "finished": 11.5,
        "prompt": Prompt(100, CHAIN, []),
        "facts": facts,
        "usage": Usage(100, 7, PromptTokensDetails(64)),
        "finish_reason": "tool_calls",
        "outcome": Outcome.OK,
    }
    return Call("r", BLOCK, **{**fields, **more})


def written(path: Path, *calls: Call) -> list[dict[str, Any]]:
    log = RequestLog.open(RequestLogConfig(path=str(path)))
    for call in calls:
        log.add(call, call.record(None))
    log.close()
    assert log.stats().failed == log.stats().dropped == 0
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_is_what_a_simulation_needs(tmp_path: Path) -> None:
    """In the words of published traces, and a few more."""
    (line,) = written(tmp_path / "log", call_of())
    assert line == {
        "timestamp": 1_700_000_000_500.0,
        "input_length": 100,
        "output_length": 7,
        "hash_ids": [block_hash[:8].hex() for block_hash in CHAIN],
        "block_size": 32,
        "session_id": keyed("my secret session", SALT, b"session"),
        "prefix": keyed("my secret prefix", SALT, b"prefix"),
        "turn": 4,
        "stop": "tool_use",
        "tenant": "acme",
        "model": "m",
        "api_time": 1.5,
        "ttft_ms": 250.0,
        "cached_tokens": 64,
    }


def test_no_word_of_a_client_stands_in_it(tmp_path: Path) -> None:
    """Nor the salt that keys them; names are equal for one tenant only."""
    path = tmp_path / "log"
    (line,) = written(path, call_of())
    assert not re.search(f"secret|{SALT}", path.read_text())
    assert re.fullmatch("[0-9a-f]{16}", line["session_id"])
    names = {
        keyed("a", SALT, b"session"),
        keyed("a", SALT, b"prefix"),
        keyed("a", "t" * 43, b"session"),
        keyed("b", SALT, b"session"),
    }
    assert len(names) == 4
    assert keyed("a", SALT, b"session") in names


def test_what_is_not_known_is_null(tmp_path: Path) -> None:
    """A client that left early, without a session, on a prompt that could not be rendered."""
    calls = (
        call_of(usage=None, first_token=None, finish_reason=None, outcome=Outcome.CANCELLED),
        call_of(prompt=None, facts=Facts()),
    )
    gone, unrendered = written(tmp_path / "log", *calls)
    assert (gone["stop"], gone["ttft_ms"], gone["cached_tokens"]) == ("cancelled", None, None)
    assert (gone["input_length"], gone["output_length"]) == (100, 0)
    assert (unrendered["hash_ids"], unrendered["input_length"]) == ([], 100)
    assert (unrendered["session_id"], unrendered["prefix"]) == (None, None)


def test_what_no_engine_answered_is_left_out(tmp_path: Path) -> None:
    """There is nothing to replay."""
    calls = (
        call_of(sent=None, outcome=Outcome.CANCELLED),
        call_of(outcome=Outcome.REFUSED),
        call_of(outcome=Outcome.ENGINE_ERROR),
        call_of(prompt=None, usage=None, outcome=Outcome.CANCELLED),
    )
    assert written(tmp_path / "log", *calls) == []


def test_a_simulation_can_read_it(tmp_path: Path) -> None:
    """Equal prompts are equal chains there."""
    path = tmp_path / "log"
    written(path, call_of(), call_of(prompt=Prompt(70, CHAIN[:2], []), finish_reason="length"))
    trace = read_trace(path)
    first, second = trace.requests
    assert (first.input_tokens, first.output_tokens, first.block_size) == (100, 7, BLOCK)
    assert (first.stop, second.stop) == (Stop.TOOL_USE, Stop.LENGTH)
    assert first.session == second.session != ""
    assert (first.turn, first.tenant, first.model, first.answer_s) == (4, "acme", "m", 1.5)
    assert second.chain == first.chain[:2]
    assert trace.num_distinct == 3


def test_a_path_that_cannot_be_written_is_said_at_the_start(tmp_path: Path) -> None:
    """With the key to mend."""
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"request_log\.path: .*file/log cannot be written"):
        RequestLog.open(RequestLogConfig(path=str(tmp_path / "file" / "log")))


def test_a_failing_disk_is_counted_and_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody else notices; it goes on when the disk does."""

    class Failing(LogFile):
        broken = True

        def write(self, lines: list[bytes]) -> None:
            if self.broken:
                raise OSError(5, "Input/output error")
            super().write(lines)

    file = Failing(tmp_path / "log", max_bytes=1000, keep=1)
    log = RequestLog(file)
    call = call_of()
    for number in range(1, 4):
        log.add(call, call.record(None))
        end = time.monotonic() + 10.0
        while log.stats().failed < number:
            assert time.monotonic() < end
            time.sleep(0.001)
    file.broken = False
    log.add(call, call.record(None))
    log.close()
    assert (log.stats().failed, log.stats().done) == (3, 1)
    assert len(caplog.records) == 1
    assert len((tmp_path / "log").read_text().splitlines()) == 1


async def test_served_requests_stand_in_it(stub_engine: Any, tmp_path: Path) -> None:
    """From a body to a line, stream and all."""
    kit = stub_engine
    log = RequestLog.open(RequestLogConfig(path=str(tmp_path / "log")))
    async with kit.open_gateway(kit.streams(kit.STREAM), request_log=log) as gateway:
        body = kit.chat(stream=True, session_id="s1", prompt_cache_key="p1")
        body["messages"] += [
            {"role": "assistant", "content": "a"},
            {"role": "user", "content": "b"},
        ]
        async with gateway.client.post("/v1/chat/completions", json=body) as response:
            await response.read()
        await gateway.settled()
    log.close()
    line = json.loads((tmp_path / "log").read_text())
    assert (line["input_length"], line["output_length"], line["cached_tokens"]) == (100, 2, 64)
    assert (line["turn"], line["stop"], len(line["hash_ids"])) == (1, "end_turn", 3)
    assert line["ttft_ms"] > 0
    assert line["session_id"] != line["prefix"]


async def test_whole_answers_and_clients_that_leave_say_how_they_ended(
    stub_engine: Any, tmp_path: Path
) -> None:
    """A tool call; a stream that nobody wanted to the end."""
    kit = stub_engine
    choice = {**kit.WHOLE["choices"][0], "finish_reason": "tool_calls"}
    log = RequestLog.open(RequestLogConfig(path=str(tmp_path / "log")))
    whole = kit.answers({**kit.WHOLE, "choices": [choice]})
    async with (
        kit.open_gateway(whole, request_log=log) as gateway,
        gateway.client.post("/v1/chat/completions", json=kit.chat()) as response,
    ):
        await response.read()
    async with kit.open_gateway(kit.streams_then_hangs(kit.STREAM[:2]), request_log=log) as gateway:
        body = kit.chat(stream=True)
        async with gateway.client.post("/v1/chat/completions", json=body) as response:
            await response.content.read(10)
            response.close()
        await gateway.settled()
    log.close()
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [line["stop"] for line in lines] == ["tool_use", "cancelled"]

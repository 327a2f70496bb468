"""Slices of traces: small on the wire, with the reuse of the trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.routing_trace import (
    WIRE_BLOCK_TOKENS,
    Slice,
    Workload,
    block_ids,
    load_workload,
    spread_ticks,
)
from prefix_store.base import BlockHash

BOTH = Slice("small", (0.0,), 100, 1.0)


def workload(tmp_path: Path, *lines: dict[str, Any], chosen: Slice = BOTH) -> Workload:
    defaults = {"timestamp": 0, "input_length": 1024, "output_length": 64}
    text = "\n".join(json.dumps(defaults | line) for line in lines)
    (tmp_path / "small.jsonl.gz").write_text(text + "\n")
    return load_workload(tmp_path, chosen)


def test_equal_chains_have_equal_tokens_and_others_differ_from_where_they_part(
    tmp_path: Path,
) -> None:
    """The third one has the same last block id, after another first one."""
    ids = [[1, 2], [1, 3], [4, 3]]
    first, second, third = (
        request.token_ids
        for request in workload(tmp_path, *({"hash_ids": each} for each in ids)).requests
    )
    size = WIRE_BLOCK_TOKENS
    assert first[:size] == second[:size]
    assert first[size:] != second[size:]
    assert second[size:] != third[size:]


def test_a_block_that_is_partly_filled_is_the_beginning_of_the_full_one(tmp_path: Path) -> None:
    """So that the next turn of a session extends the prompt."""
    part, full = workload(
        tmp_path, {"input_length": 600, "hash_ids": [1, 2]}, {"hash_ids": [1, 2]}
    ).requests
    assert len(part.token_ids) == 19  # 600 tokens of the trace, 32 a token on the wire
    assert full.token_ids[:19] == part.token_ids
    assert len(full.token_ids) == 2 * WIRE_BLOCK_TOKENS


def test_names_make_different_blocks() -> None:
    """As far as a thousand of them can tell."""
    names = [BlockHash(i.to_bytes(16, "big")) for i in range(1000)]
    assert len({block_ids(name) for name in names}) == len(names)


def test_arrivals_of_one_tick_are_spread_until_the_next_one() -> None:
    """Nobody knows how long the last tick was: those stay together."""
    assert spread_ticks([0.0, 0.0, 0.0, 3.0, 6.0, 6.0]) == [0.0, 1.0, 2.0, 3.0, 6.0, 6.0]


def test_thinking_begins_when_the_answer_has_ended(tmp_path: Path) -> None:
    """The first turn of a session waits for nobody."""
    turns = workload(
        tmp_path,
        {"timestamp": 0, "api_time": 2.0, "session_id": "s", "hash_ids": [1]},
        {"timestamp": 5000, "api_time": 2.0, "session_id": "s", "hash_ids": [1]},
        {"timestamp": 6000, "api_time": 2.0, "session_id": "s", "hash_ids": [1]},
    ).requests
    assert [turn.think_s for turn in turns] == [0.0, 3.0, 0.0]
    assert [turn.at_s for turn in turns] == [0.0, 5.0, 6.0]


def test_windows_are_laid_over_one_another(tmp_path: Path) -> None:
    """A session that reaches into both is two sessions."""
    lines = [{"timestamp": 1000 * s, "session_id": "s", "hash_ids": [s]} for s in range(5)]
    requests = workload(tmp_path, *lines, chosen=Slice("small", (0.0, 0.5), 4, 1.0)).requests
    assert [request.at_s for request in requests] == [0.0, 0.0, 1.0, 1.0]
    assert len({request.session for request in requests}) == 2


def test_a_request_says_its_session_and_asks_for_usage(tmp_path: Path) -> None:
    """As bytes that can be sent as they are."""
    request = workload(tmp_path, {"session_id": 7, "hash_ids": [1]}).requests[0]
    head, _, body = request.http("http://gateway:1", "m", explain=True).partition(b"\r\n\r\n")
    assert b"\r\nHost: gateway:1\r\n" in head
    assert b"\r\nx-headstart-session: 0-7\r\n" in head
    assert b"\r\nx-headstart-explain: 1\r\n" in head
    assert f"Content-Length: {len(body)}".encode() in head
    assert json.loads(body)["stream_options"] == {"include_usage": True}

"""Reading traces: formats, order, names of blocks, mistakes."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from policies.access import Stop
from prefix_store.simulation.base import SimulationError
from prefix_store.simulation.trace import read_trace


def line_of(timestamp: float, ids: list[Any], **more: Any) -> dict[str, Any]:
    length = 512 * len(ids)
    return {"timestamp": timestamp, "input_length": length, "hash_ids": ids, **more}


def write_lines(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_plain_and_gzip_give_the_same_trace(tmp_path: Path) -> None:
    """What the file is shows in its first bytes, not in its name."""
    plain = write_lines(tmp_path / "a", line_of(1000, [1, 2], output_length=7))
    packed = tmp_path / "b"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read_trace(plain).requests == read_trace(packed).requests
    (request,) = read_trace(plain).requests
    assert request.time_s == 1.0
    assert request.output_tokens == 7
    assert request.block_size == 512


def test_a_block_is_named_by_its_whole_prefix(tmp_path: Path) -> None:
    """Equal ids after different ones are different blocks."""
    file = write_lines(tmp_path / "t", line_of(0, [1, 2]), line_of(1, [3, 2]), line_of(2, [1, 2]))
    trace = read_trace(file)
    first, second, third = (request.chain for request in trace.requests)
    assert first == third
    assert first[1] != second[1]
    assert (trace.num_blocks, trace.num_distinct) == (6, 4)


def test_requests_are_put_in_the_order_of_their_arrival(tmp_path: Path) -> None:
    """The gateway logs a request when it has ended."""
    file = write_lines(tmp_path / "t", line_of(2000, [1]), line_of(1000, [2]))
    assert [request.time_s for request in read_trace(file).requests] == [1.0, 2.0]


def test_line_of_the_gateways_log_is_understood(tmp_path: Path) -> None:
    """Hex texts, other block sizes and keys that only the log has."""
    file = write_lines(
        tmp_path / "t",
        line_of(
            5, ["ab", "cd"], block_size=32, session_id="s", turn=3, stop="tool_use", tenant="t",
            model="m", ttft_ms=12.5, cached_tokens=0, output_length=None,
        ),
    )  # fmt: skip
    (request,) = read_trace(file).requests
    assert (request.block_size, request.session, request.turn) == (32, "s", 3)
    assert (request.stop, request.tenant, request.model) == (Stop.TOOL_USE, "t", "m")


@pytest.mark.parametrize(
    ("stop", "meaning"),
    [
        ("end_turn", Stop.END_TURN), ("stop", Stop.END_TURN), ("tool_calls", Stop.TOOL_USE),
        ("max_tokens", Stop.LENGTH), ("whatever", Stop.UNKNOWN), (None, Stop.UNKNOWN),
    ],
)  # fmt: skip
def test_stops_of_all_dialects_are_known(stop: str | None, meaning: Stop, tmp_path: Path) -> None:
    """Traces come from different APIs."""
    (request,) = read_trace(write_lines(tmp_path / "t", line_of(0, [1], stop=stop))).requests
    assert request.stop is meaning


def test_last_block_of_a_prompt_may_be_partly_filled(tmp_path: Path) -> None:
    """Tokens are counted, not blocks."""
    line = {"timestamp": 0, "input_length": 700, "hash_ids": [1, 2]}
    (request,) = read_trace(write_lines(tmp_path / "t", line)).requests
    assert [request.tokens_in(n) for n in range(3)] == [0, 512, 700]


@pytest.mark.parametrize(
    "bad",
    [
        "{", '{"timestamp": 1}', '{"timestamp": 1, "input_length": -1, "hash_ids": []}',
        '{"timestamp": "x", "input_length": 1, "hash_ids": []}', "[]", "\xff",
    ],
)  # fmt: skip
def test_bad_line_is_named_by_its_number(bad: str, tmp_path: Path) -> None:
    """The user has to find it; empty lines count but do not matter."""
    good = json.dumps(line_of(0, [1]))
    file = tmp_path / "t"
    file.write_bytes(f"{good}\n\n{bad}\n".encode("latin-1"))
    with pytest.raises(SimulationError, match=r"t line 3: "):
        read_trace(file)


def test_unreadable_and_empty_files_say_so(tmp_path: Path) -> None:
    """One sentence with the file's name."""
    with pytest.raises(SimulationError, match="cannot be read"):
        read_trace(tmp_path / "none")
    torn = tmp_path / "torn.gz"
    torn.write_bytes(gzip.compress(b"x" * 1000)[:-10])
    with pytest.raises(SimulationError, match=r"torn\.gz"):
        read_trace(torn)
    empty = tmp_path / "empty"
    empty.write_text("\n")
    with pytest.raises(SimulationError, match="no requests"):
        read_trace(empty)

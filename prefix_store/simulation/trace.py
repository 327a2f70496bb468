"""Reads request traces: JSON lines, plain or gzip, from published traces or the gateway's own log.

Each line: `timestamp` (ms), `input_length` and `output_length` (tokens), `hash_ids` (one number or
hex text per block of the input, heads first). Optional: `block_size` (512), `session_id`, `turn`,
`stop`, `api_time` (s until the answer had ended), `tenant`, `model`, `prefix`. Other keys are
ignored. An id means something only after the ids before it.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from policies.access import Stop
from prefix_store.base import BlockHash
from prefix_store.simulation.base import SimulationError

BLOCK_SIZE = 512
"""Tokens per block where a line does not say it: that of the published traces."""

_STOPS = {
    **{stop.value: stop for stop in Stop},
    "stop": Stop.END_TURN,
    "stop_sequence": Stop.END_TURN,
    "tool_calls": Stop.TOOL_USE,
    "max_tokens": Stop.LENGTH,
}

Chain = list[BlockHash]


class TraceRequest(msgspec.Struct, frozen=True, gc=False):
    """One request of a trace."""

    time_s: float
    answer_s: float
    """From its arrival to the end of its answer; 0 where the trace does not say it."""
    input_tokens: int
    output_tokens: int
    block_size: int
    chain: Chain
    """Names of its blocks, heads first: each stands for itself and all before it."""
    session: str = ""
    turn: int | None = None
    stop: Stop = Stop.UNKNOWN
    tenant: str = ""
    model: str = ""
    prefix: str = ""

    def tokens_in(self, num_blocks: int) -> int:
        """Tokens in its first blocks; the last one of a prompt may be partly filled."""
        return min(num_blocks * self.block_size, self.input_tokens)


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their arrival."""

    name: str
    requests: list[TraceRequest]
    num_blocks: int
    """Of all requests together."""
    num_distinct: int
    """Different ones among them."""


class _Line(msgspec.Struct):
    timestamp: float
    input_length: int
    hash_ids: list[int | str]
    output_length: int | None = None
    block_size: int | None = None
    session_id: str | int | None = None
    turn: int | None = None
    stop: str | None = None
    api_time: float | None = None
    tenant: str | None = None
    model: str | None = None
    prefix: str | None = None

    def __post_init__(self) -> None:
        if self.input_length < 0 or (self.block_size is not None and self.block_size < 1):
            raise ValueError("lengths must not be negative")


def read_trace(path: Path) -> Trace:
    """The whole trace. Raises SimulationError with the number of the first line that is wrong."""
    names: dict[tuple[BlockHash | None, int | str], BlockHash] = {}
    decode = msgspec.json.Decoder(_Line).decode
    requests: list[TraceRequest] = []
    number = 0
    try:
        for raw in _lines(path):
            number += 1
            if raw.strip():
                requests.append(_request(decode(raw), names))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SimulationError(f"{path} line {number}: {error}; see the trace format") from error
    except (OSError, EOFError, zlib.error) as error:
        what = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise SimulationError(f"{path}: cannot be read ({what}); check the file") from error
    if not requests:
        raise SimulationError(f"{path}: no requests in it; give a trace with JSON lines")
    requests.sort(key=lambda request: request.time_s)
    num_blocks = sum(len(request.chain) for request in requests)
    return Trace(path.name, requests, num_blocks, len(names))


def _lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as plain:
        magic = plain.peek(2)[:2]
        if magic == b"\x1f\x8b":
            with gzip.open(plain) as unpacked:
                yield from unpacked
        else:
            yield from plain


def _request(
    line: _Line, names: dict[tuple[BlockHash | None, int | str], BlockHash]
) -> TraceRequest:
    name: BlockHash | None = None
    chain: Chain = []
    for block in line.hash_ids:
        key = (name, block)
        name = names.get(key)
        if name is None:
            name = names[key] = BlockHash(len(names).to_bytes(16, "big"))
        chain.append(name)
    return TraceRequest(
        time_s=line.timestamp / 1000,
        answer_s=max(0.0, line.api_time or 0.0),
        input_tokens=line.input_length,
        output_tokens=line.output_length or 0,
        block_size=line.block_size or BLOCK_SIZE,
        chain=chain,
        session=str(line.session_id) if line.session_id is not None else "",
        turn=line.turn,
        stop=_STOPS.get(line.stop or "", Stop.UNKNOWN),
        tenant=line.tenant or "",
        model=line.model or "",
        prefix=line.prefix or "",
    )

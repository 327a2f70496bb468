"""What bench.routing replays: contiguous slices of request traces, made small enough for the wire.

A block of 512 tokens of a trace becomes a block of 16 token ids, so a token on the wire stands for
32 of the trace. The ids of a block are derived from its name in the trace, which stands for the
block and all before it: equal ids mean equal prefixes, and nothing else is equal.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from prefix_store.base import BlockHash
from prefix_store.simulation.trace import TraceRequest, read_trace

BLOCK_TOKENS = 512
WIRE_BLOCK_TOKENS = 16
TOKENS_PER_WIRE_TOKEN = BLOCK_TOKENS // WIRE_BLOCK_TOKENS
MAX_WIRE_TOKENS = 32_768

_FIRST_ID = 1000
_NUM_IDS = 9000
"""Token ids of four digits keep bodies small; 16 of them tell blocks apart well enough."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Which requests of a trace are replayed: all those of some windows of time, so that reuse
    between neighbours stays as it was. Several windows are laid over one another: sessions do not
    get faster under load, there are more of them. What the first requests reuse from before their
    window is lost to all policies alike, and the first half of a run is not counted."""

    trace: str
    windows: tuple[float, ...]
    """Where they begin, as shares of the trace's time; all are equally long."""
    num_requests: int
    """Of all windows together."""
    seconds: float
    """Real time in which its arrivals come. With less of it the milliseconds that HTTP and two
    cores add would be seconds of simulated time, and would hide what a policy is worth."""


SLICES = (
    Slice("agent_sessions_a", (0.3, 0.5, 0.7), 1600, 30.0),
    Slice("conversation", (0.25,), 2400, 30.0),
    Slice("synthetic", (0.25,), 2400, 30.0),
)


@dataclass(frozen=True, slots=True)
class _Picked:
    """A request of a window."""

    at_s: float
    """Since its window's begin."""
    session: str
    request: TraceRequest


@dataclass(frozen=True, slots=True)
class WireRequest:
    """One request of a slice. Lengths are those on the wire; times are the trace's, in seconds."""

    at_s: float
    """Since the first one."""
    think_s: float
    """Between the end of the session's earlier answer and this request."""
    session: str
    """Empty where the trace does not say it."""
    token_ids: tuple[int, ...]
    output_tokens: int

    def http(self, url: str, model: str, *, explain: bool = False) -> bytes:
        """As a streamed completion request; `explain`: the answer says how it was routed."""
        fields = {
            "model": model, "prompt": self.token_ids, "max_tokens": self.output_tokens,
            "temperature": 0, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        body = json.dumps(fields, separators=(",", ":")).encode()
        more = f"x-headstart-session: {self.session}\r\n" if self.session else ""
        more += "x-headstart-explain: 1\r\n" if explain else ""
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\n{more}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


@dataclass(frozen=True, slots=True)
class Workload:
    """A slice, ready to be sent."""

    name: str
    requests: tuple[WireRequest, ...]
    """In the order of the trace."""
    distinct_tokens: int
    """On the wire, in different blocks."""

    @property
    def span_s(self) -> float:
        """Of the trace's clock."""
        return self.requests[-1].at_s or 1.0


def load_workload(directory: Path, chosen: Slice, num_requests: int | None = None) -> Workload:
    """Reads the trace below `directory`."""
    requests = read_trace(directory / f"{chosen.trace}.jsonl.gz").requests
    picked = _pick(requests, chosen.windows, num_requests or chosen.num_requests)
    ids: dict[BlockHash, tuple[int, ...]] = {}
    answered: dict[str, float] = {}
    result = []
    for each in picked:
        request = each.request
        earlier = answered.get(each.session, request.time_s)
        answered[each.session] = request.time_s + request.answer_s
        result.append(
            WireRequest(
                at_s=each.at_s - picked[0].at_s,
                think_s=max(0.0, request.time_s - earlier),
                session=each.session,
                token_ids=_token_ids(request, ids),
                output_tokens=max(1, round(request.output_tokens / TOKENS_PER_WIRE_TOKEN)),
            )
        )
    return Workload(chosen.trace, tuple(result), len(ids) * WIRE_BLOCK_TOKENS)


def _pick(requests: list[TraceRequest], windows: tuple[float, ...], count: int) -> list[_Picked]:
    times = spread_ticks([request.time_s for request in requests])
    first, span = times[0], times[-1] - times[0]
    picked = []
    for number, share in enumerate(windows):
        start = first + share * span
        for time_s, request in zip(times, requests, strict=True):
            if time_s >= start:
                # A session that reaches into two windows is two sessions.
                session = f"{number}-{request.session}" if request.session else ""
                picked.append(_Picked(time_s - start, session, request))
    picked.sort(key=lambda each: each.at_s)
    return picked[:count]


def sessions_of(workload: Workload) -> list[list[int]]:
    """Numbers of the requests that wait for one another, session by session; a request without a
    session is one of its own."""
    sessions: dict[str, list[int]] = {}
    for index, request in enumerate(workload.requests):
        sessions.setdefault(request.session or f"#{index}", []).append(index)
    return list(sessions.values())


def spread_ticks(times_s: list[float]) -> list[float]:
    """Arrivals that carry the same time, spread evenly until the next one: the clock of one trace
    ticks every three seconds, and what came within a tick did not come at once."""
    result = list(times_s)
    first = 0
    for i in range(1, len(times_s) + 1):
        if i < len(times_s) and times_s[i] == times_s[first]:
            continue
        width = times_s[i] - times_s[first] if i < len(times_s) else 0.0
        for j in range(first, i):
            result[j] = times_s[first] + width * (j - first) / (i - first)
        first = i
    return result


def _token_ids(request: TraceRequest, ids: dict[BlockHash, tuple[int, ...]]) -> tuple[int, ...]:
    length = max(1, -(-request.input_tokens // TOKENS_PER_WIRE_TOKEN))
    tokens: list[int] = []
    for name in request.chain:
        block = ids.get(name)
        if block is None:
            block = ids[name] = block_ids(name)
        tokens += block
    return tuple(tokens[: min(length, MAX_WIRE_TOKENS)]) or (_FIRST_ID,)


def block_ids(name: BlockHash) -> tuple[int, ...]:
    """Token ids of the block with this name."""
    raw = hashlib.blake2b(name, digest_size=2 * WIRE_BLOCK_TOKENS).digest()
    numbers = memoryview(raw).cast("H")
    return tuple(_FIRST_ID + number % _NUM_IDS for number in numbers)

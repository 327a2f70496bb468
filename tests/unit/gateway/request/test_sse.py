"""Events are found wherever the bytes were split, and no byte is lost."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.request.sse import SseScanner, event_data

PIECES = st.lists(
    st.sampled_from(
        [b"\n", b"\r\n", b"\r", b"data: x", b"data:", b": c", b"event: e", b"\xff", b""]
    ),
    max_size=40,
).map(b"".join)


@st.composite
def split_streams(draw: st.DrawFn) -> tuple[bytes, list[bytes]]:
    """Bytes with many line ends, and the same bytes in pieces."""
    raw = draw(PIECES)
    cuts = sorted(draw(st.lists(st.integers(0, len(raw)), max_size=20)))
    edges = [0, *cuts, len(raw)]
    return raw, [raw[a:b] for a, b in itertools.pairwise(edges)]


def naive_events(raw: bytes) -> tuple[list[bytes], bytes]:
    """Line by line, as the specification tells it; CR alone ends no line here."""
    events: list[bytes] = []
    current = b""
    for line in raw.split(b"\n")[:-1]:
        current += line + b"\n"
        if line.removesuffix(b"\r") == b"" and current not in (b"\n", b"\r\n"):
            events.append(current)
            current = b""
    return events, current + raw.split(b"\n")[-1]


@given(split_streams())
def test_any_split_gives_the_same_events(case):
    """Fed at once or in pieces, empty ones included."""
    raw, pieces = case
    whole, parts = SseScanner(), SseScanner()
    events = whole.feed(raw)
    assert [event for piece in pieces for event in parts.feed(piece)] == events
    rest = whole.flush()
    assert parts.flush() == rest
    assert b"".join(events) + rest == raw


@given(split_streams())
def test_events_end_with_their_first_blank_line(case):
    """Against a scanner that goes line by line."""
    raw, pieces = case
    scanner = SseScanner()
    events = [event for piece in pieces for event in scanner.feed(piece)]
    assert (events, scanner.flush()) == naive_events(raw)


@given(split_streams())
def test_a_bound_loses_nothing(case):
    """What is longer than the bound goes out in pieces."""
    raw, pieces = case
    scanner = SseScanner(max_event_bytes=5)
    out = b"".join(event for piece in pieces for event in scanner.feed(piece))
    assert out + scanner.flush() == raw


def test_line_ends_may_be_mixed():
    """In one chunk that also ends like one event."""
    assert SseScanner().feed(b"a\n\r\nb\n\n") == [b"a\n\r\n", b"b\n\n"]


def test_events_are_found_again_after_one_that_was_too_long():
    """The bound costs the view of one event only."""
    scanner = SseScanner(max_event_bytes=10)
    scanner.feed(b"x" * 11)
    assert scanner.feed(b"x\n\n") == [b"x\n\n"]
    scanner.feed(b"x" * 9)
    scanner.flush()
    assert scanner.feed(b"\r\n\r\na") == [b"\r\n\r\n"]


def test_held_bytes_are_bounded():
    """An event without an end is not collected for ever."""
    scanner = SseScanner(max_event_bytes=1000)
    out = sum(len(event) for _ in range(100) for event in scanner.feed(b"x" * 100))
    assert out >= 100 * 100 - 1000
    assert len(scanner.flush()) <= 1000


@pytest.mark.parametrize(
    ("event", "data"),
    [
        (b"data: {}\n\n", b"{}"),
        (b"data:{}\n\n", b"{}"),
        (b"data: a\r\n\r\n", b"a"),
        (b"event: x\ndata: a\nid: 1\ndata: b\n\n", b"a\nb"),
        (b"data:  two\n\n", b" two"),
        (b": ping\n\n", b""),
        (b"data: cut off", b"cut off"),
    ],
)
def test_data_of_an_event(event, data):
    """Data lines without their field name and one space, joined by LF."""
    assert event_data(event) == data

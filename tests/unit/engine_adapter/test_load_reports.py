"""Load reports find the request that they belong to."""

from __future__ import annotations

import pytest

from engine_adapter.load_reports import LoadReports, client_request_id, is_repeated_sample
from prefix_store.events import BlocksLoaded

UUID = "123e4567-e89b-42d3-a456-426614174000"


def loaded(request_id: str, num_tokens: int = 64, **fields: bool) -> BlocksLoaded:
    return BlocksLoaded(request_id, num_tokens, num_tokens * 10, 0.5, **{"ok": True, **fields})


@pytest.mark.parametrize(
    ("internal_id", "request_id"),
    [
        (f"chatcmpl-{UUID}-0a1b2c3d", UUID),
        (f"chatcmpl-{UUID}", UUID),
        (f"cmpl-{UUID}-0-0a1b2c3d", UUID),
        (f"cmpl-{UUID}-17", UUID),
        (f"0_chatcmpl-{UUID}-0a1b2c3d", UUID),
        (f"3_cmpl-{UUID}-1-0a1b2c3d", UUID),
        ("chatcmpl-my-id-7-0a1b2c3d", "my-id-7"),
        ("cmpl-my-id-7-0-0a1b2c3d", "my-id-7"),
        ("chatcmpl-x-deadbeef-0a1b2c3d", "x-deadbeef"),
        ("chatcmpl-chatcmpl-x-0a1b2c3d", "chatcmpl-x"),
        ("something else", "something else"),
        ("", ""),
    ],
)
def test_client_request_id(internal_id: str, request_id: str) -> None:
    """What the engine puts around the id goes, what the client wrote stays."""
    assert client_request_id(internal_id) == request_id


def test_repeated_samples_are_told() -> None:
    """Only the first answer to a prompt counts its load."""
    assert not is_repeated_sample(f"chatcmpl-{UUID}-0a1b2c3d")
    assert not is_repeated_sample(f"0_chatcmpl-{UUID}-0a1b2c3d")
    assert is_repeated_sample(f"2_chatcmpl-{UUID}-0a1b2c3d")


def test_a_report_is_taken_once() -> None:
    """Whoever asks twice gets nothing the second time."""
    reports = LoadReports()
    reports.add(loaded("chatcmpl-a-0a1b2c3d"))
    assert reports.take("b") is None
    taken = reports.take("a")
    assert taken is not None
    assert (taken.request_id, taken.num_tokens, taken.num_bytes) == ("a", 64, 640)
    assert reports.take("a") is None


def test_loads_of_one_request_add_up() -> None:
    """A body with several prompts loads for each of them."""
    reports = LoadReports()
    reports.add(loaded("cmpl-a-0-0a1b2c3d", 32))
    reports.add(loaded("cmpl-a-1-99999999", 64))
    taken = reports.take("a")
    assert taken is not None
    assert (taken.num_tokens, taken.num_bytes, taken.duration_s) == (96, 960, 1.0)


def test_what_saved_nothing_is_not_counted() -> None:
    """Failed loads, repeats after a preemption, and repeats for further samples."""
    reports = LoadReports()
    reports.add(loaded("chatcmpl-a-0a1b2c3d", ok=False))
    reports.add(loaded("chatcmpl-a-0a1b2c3d", preempted=True))
    reports.add(loaded("1_chatcmpl-a-0a1b2c3d"))
    assert reports.take("a") is None
    assert (reports.received, reports.not_counted) == (3, 3)


def test_reports_are_bounded_and_the_oldest_go() -> None:
    """Requests that never ask do not fill the memory."""
    reports = LoadReports(max_requests=3)
    for number in range(10):
        reports.add(loaded(f"chatcmpl-{number}-0a1b2c3d"))
    assert len(reports) == 3
    assert reports.forgotten == 7
    assert reports.take("6") is None
    assert reports.take("7") is not None

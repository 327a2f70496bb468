"""Load reports find the request that they belong to."""

from __future__ import annotations

from engine_adapter.load_reports import LoadReports
from prefix_store.events import BlocksLoaded


def loaded(
    request_id: str, num_tokens: int = 64, *, promised: int | None = None, preempted: bool = False
) -> BlocksLoaded:
    promised = num_tokens if promised is None else promised
    return BlocksLoaded(request_id, num_tokens, promised, num_tokens * 10, 0.5, preempted)


def test_a_report_is_taken_once_under_exactly_its_id() -> None:
    """Ids that look like the engine's own are no exception. Who asks twice gets nothing."""
    reports = LoadReports()
    reports.add(loaded("chatcmpl-a-0a1b2c3d"))
    assert reports.take("a") is None
    assert reports.take("chatcmpl-a-0a1b2c3d") == loaded("chatcmpl-a-0a1b2c3d")
    assert reports.take("chatcmpl-a-0a1b2c3d") is None


def test_only_the_first_load_of_a_body_counts() -> None:
    """n > 1 answers load the same blocks again, and the engine's usage counts the prompt once."""
    reports = LoadReports()
    reports.add(loaded("a", 64))
    reports.add(loaded("a", 96))
    assert reports.take("a") == loaded("a", 64)
    assert (reports.received, reports.not_counted) == (2, 1)


def test_failed_loads_are_kept() -> None:
    """What they promised is in the engine's usage, whatever became of it."""
    reports = LoadReports()
    reports.add(loaded("a", 0, promised=64))
    taken = reports.take("a")
    assert taken is not None
    assert (taken.num_tokens, taken.promised_tokens, taken.ok) == (0, 64, False)


def test_repeats_after_a_preemption_are_not_counted() -> None:
    """The engine reports what it reused at first, and the repeat saved nothing."""
    reports = LoadReports()
    reports.add(loaded("a", 64))
    reports.add(loaded("a", 96, preempted=True))
    reports.add(loaded("b", 64, preempted=True))
    assert reports.take("a") == loaded("a", 64)
    assert reports.take("b") is None
    assert (reports.received, reports.not_counted) == (3, 2)


def test_reports_are_bounded_and_the_oldest_go() -> None:
    """Requests that never ask do not fill the memory."""
    reports = LoadReports(max_requests=3)
    for number in range(10):
        reports.add(loaded(str(number)))
    assert len(reports) == 3
    assert reports.forgotten == 7
    assert reports.take("6") is None
    assert reports.take("7") is not None

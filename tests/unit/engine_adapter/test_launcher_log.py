"""The reason for a failed start, out of vLLM's log."""

from __future__ import annotations

import pytest

from engine_adapter.engine_log import MAX_CHARS, failure_reason

CASES = {
    "usage": (
        "usage: api_server.py [-h] ...\napi_server.py: error: unrecognized arguments: --foo 3\n",
        "unrecognized arguments: --foo 3",
    ),
    "root cause": (
        "(EngineCore pid=12) ERROR 11-30 02:32:11 [core.py:1] OSError: [Errno 98] in use\n"
        "(APIServer pid=2) RuntimeError: Engine core initialization failed. "
        "See root cause above. Failed core proc(s): {}\n",
        "OSError: [Errno 98] in use",
    ),
    "pydantic": (
        "(APIServer pid=3) pydantic_core._pydantic_core.ValidationError: 1 validation error\n"
        "(APIServer pid=3)   Value error, max_model_len is too large [type=value_error, ...]\n"
        "(APIServer pid=3)     For further information visit https://example.org\n",
        "max_model_len is too large",
    ),
    "no exception": ("INFO 11-30 02:32:11 [a.py:1] loading\nKilled\n\n", "Killed"),
    "empty": ("", None),
}


@pytest.mark.parametrize("name", CASES)
def test_the_line_that_tells_the_cause_is_found(name: str) -> None:
    """Prefixes, wrappers and consequences are left out."""
    log, reason = CASES[name]
    assert failure_reason(log) == reason


def test_reason_stays_short() -> None:
    """An error that prints a configuration does not fill the terminal."""
    reason = failure_reason("ValueError: " + "x" * 5000)
    assert reason is not None
    assert len(reason) == MAX_CHARS + 3

"""Finds in vLLM's log the one line that says why it did not start."""

from __future__ import annotations

import re

_PREFIX = re.compile(
    r"^(?:\((?:\w+)(?: pid=\d+)?[^)]*\)\s*)*"
    r"(?:(?:ERROR|CRITICAL|WARNING|INFO) \d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)? \[[^\]]+\]\s*)?"
)
_EXCEPTION = re.compile(r"^(?:[\w.]+\.)?(\w*(?:Error|Exception|Interrupt)): (.+)$")
_USAGE = re.compile(r"^[\w. -]+: error: (.+)$")
_PYDANTIC = re.compile(r"^\s*(?:Value error|Assertion failed), (.+?)(?: \[type=.*)?$")
_NOT_THE_CAUSE = ("Engine core initialization failed", "See root cause above", "Engine process")

MAX_CHARS = 300


def failure_reason(log: str) -> str | None:
    """The last exception that is a cause of its own, else the last line, without prefixes.

    At most 300 characters: what follows stands in the log.
    """
    reason = _reason(log)
    return reason if reason is None or len(reason) <= MAX_CHARS else reason[:MAX_CHARS] + "..."


def _reason(log: str) -> str | None:
    lines = [_PREFIX.sub("", line.rstrip()) for line in log.splitlines()]
    for line in reversed(lines):
        if detail := _PYDANTIC.match(line):
            return detail[1]
        if usage := _USAGE.match(line):
            return usage[1]
        found = _EXCEPTION.match(line)
        if found and not any(words in found[2] for words in _NOT_THE_CAUSE):
            return f"{found[1]}: {found[2]}"
    texts = [line for line in lines if line.strip()]
    return texts[-1] if texts else None

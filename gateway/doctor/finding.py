"""What one check of the doctor found."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Level(enum.StrEnum):
    """How bad it is."""

    OK = "ok"
    WARN = "warn"
    """Works, but not as it could."""
    FAIL = "FAIL"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's report."""

    level: Level
    check: str
    detail: str
    """For ok: what was seen. Otherwise: what is wrong and what to change."""

    def line(self) -> str:
        return f"{self.level:<4}  {self.check}: {self.detail}"


def ok(check: str, detail: str) -> Finding:
    return Finding(Level.OK, check, detail)


def warn(check: str, detail: str) -> Finding:
    return Finding(Level.WARN, check, detail)


def fail(check: str, detail: str) -> Finding:
    return Finding(Level.FAIL, check, detail)

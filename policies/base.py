"""What every part of the configuration shares: strictness, sizes, durations."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ByteSize, ConfigDict

MIB = 1024**2
GIB = 1024**3

_DURATION = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)\s*$")
_UNIT_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


class Settings(BaseModel):
    """A part of the configuration: unknown keys are refused, values never change afterwards."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


def parse_duration(value: object) -> object:
    """Seconds from "250ms", "30s", "5m", "1h", "2d" or a plain number of seconds."""
    if not isinstance(value, str):
        return value
    match = _DURATION.match(value)
    if match is None:
        raise ValueError(f"{value!r} is not a duration; write 250ms, 30s, 5m, 1h or 2d")
    return float(match[1]) * _UNIT_S[match[2]]


Duration = Annotated[float, BeforeValidator(parse_duration)]
"""Seconds; in YAML a number or a text such as 30s."""

Size = ByteSize
"""Bytes; in YAML a number or a text such as 4GiB."""

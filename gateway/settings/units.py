"""Sizes and spans of time for people."""

from __future__ import annotations


def size(num_bytes: float) -> str:
    """Such as 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:,.4g} TiB"


def span(seconds: float) -> str:
    """Such as 3 h; in the largest unit of which there are two."""
    for length, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"

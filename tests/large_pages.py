"""What the kernel says of memory that is mapped here."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path


def address_of(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def mapped_kib(view: memoryview, field: str) -> int:
    """A figure of the mapping that begins with this view: Rss, ShmemPmdMapped."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    next(line for line in lines if line.startswith(f"{address_of(view):x}-"))
    return int(next(line for line in lines if line.startswith(f"{field}:")).split()[1])


def kernel_collapses() -> bool:
    """Linux 6.1 or newer, with large pages built in."""
    release = tuple(int(part) for part in os.uname().release.split(".")[:2])
    return release >= (6, 1) and Path("/sys/kernel/mm/transparent_hugepage").is_dir()

"""Writes past the page cache (O_DIRECT), for which bytes must lie at whole pages."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

_PROBE = "tmp-probe"


class AlignedBuffers:
    """One buffer a thread, as long as the largest record that it wrote."""

    def __init__(self) -> None:
        self._of_thread = threading.local()

    def gather(self, parts: Sequence[memoryview]) -> memoryview:
        """Copy parts behind one another, filled up to a whole page. Holds until the thread's next
        call."""
        num_bytes = sum(map(len, parts))
        padded = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        buffer: mmap.mmap | None = getattr(self._of_thread, "buffer", None)
        if buffer is None or len(buffer) < padded:
            buffer = self._of_thread.buffer = mmap.mmap(-1, padded)
        view, at = np.frombuffer(buffer, np.uint8), 0
        for part in parts:  # numpy lets other threads run meanwhile
            view[at : at + len(part)] = np.frombuffer(part, np.uint8)
            at += len(part)
        view[at:padded] = 0
        return memoryview(buffer)[:padded]


def can_write_direct(directory: int) -> bool:
    """Whether this file system takes such writes; some do not."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_DIRECT
    page = AlignedBuffers().gather([memoryview(b"probe")])
    try:
        fd = os.open(_PROBE, flags, 0o600, dir_fd=directory)
        try:
            os.pwrite(fd, page, 0)
        finally:
            os.close(fd)
    except OSError:
        return False
    finally:
        with suppress(OSError):
            os.unlink(_PROBE, dir_fd=directory)
    return True

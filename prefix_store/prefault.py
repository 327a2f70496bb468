"""Has the kernel map memory before it is needed."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable

_HUGEPAGE = 14
_POPULATE_WRITE = 23
_STEP_BYTES = 64 * 1024**2


def prefault(
    address: int,
    num_bytes: int,
    *,
    huge: bool = False,
    is_wanted: Callable[[], bool] = lambda: True,
) -> None:
    """Map the whole pages of this range, as large pages where asked for and possible. Changes no
    byte. Through ctypes, which lets other threads run meanwhile (mmap.madvise does not). Older
    kernels ignore it; then pages come at their first touch. Ends early when it is not wanted any
    more."""
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    stop = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    for advice in (_HUGEPAGE, _POPULATE_WRITE) if huge else (_POPULATE_WRITE,):
        for at in range(start, stop, _STEP_BYTES):
            length = min(_STEP_BYTES, stop - at)
            if not is_wanted():
                return
            if madvise(ctypes.c_void_p(at), ctypes.c_size_t(length), advice) != 0:
                break

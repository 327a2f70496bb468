"""Has the kernel map memory before it is needed, and in large pages."""

from __future__ import annotations

import ctypes
import errno
import mmap
from collections.abc import Callable, Iterator

_HUGEPAGE = 14
_POPULATE_WRITE = 23
_COLLAPSE = 25
_STEP_BYTES = 64 * 1024**2

_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def prefault(address: int, num_bytes: int, *, is_wanted: Callable[[], bool] = lambda: True) -> None:
    """Map the whole pages of this range. Changes no byte. Through ctypes, which lets other threads
    run meanwhile (mmap.madvise does not). Kernels before Linux 5.14 ignore it; then pages come at
    their first touch. Ends early when it is not wanted any more."""
    for start, length in _steps(address, num_bytes):
        if not is_wanted() or _advise(start, length, _POPULATE_WRITE):
            return


def use_large_pages(address: int, num_bytes: int) -> None:
    """Keep this range in large pages as far as there are any: memory that was idle is then up to
    four times as fast to touch (`python -m bench.idle_memory`). Small pages that are there are
    copied together, whatever the machine's settings for shared memory are (Linux 6.1); where
    nothing is yet, a page that comes later is a large one, if the settings allow it. Changes no
    byte."""
    for start, length in _steps(address, num_bytes):
        _advise(start, length, _HUGEPAGE)
        if _advise(start, length, _COLLAPSE) in (errno.ENOMEM, errno.EBUSY):
            return  # none left, and the kernel would look for one each time


def _steps(address: int, num_bytes: int) -> Iterator[tuple[int, int]]:
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    stop = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    for at in range(start, stop, _STEP_BYTES):
        yield at, min(_STEP_BYTES, stop - at)


def _advise(address: int, length: int, advice: int) -> int:
    """An errno, or 0."""
    return 0 if _madvise(address, length, advice) == 0 else ctypes.get_errno()

"""Has the kernel map memory before it is needed, in large pages where asked for."""

from __future__ import annotations

import ctypes
import errno
import mmap
from collections.abc import Callable

_HUGEPAGE = 14
_POPULATE_WRITE = 23
_COLLAPSE = 25
_STEP_BYTES = 64 * 1024**2


def prefault(
    address: int,
    num_bytes: int,
    *,
    huge: bool = False,
    is_wanted: Callable[[], bool] = lambda: True,
) -> None:
    """Map the whole pages of this range; huge: as large pages where possible, also what is there
    in small ones already. Changes no byte. Through ctypes, which lets other threads run meanwhile
    (mmap.madvise does not). Older kernels ignore it (Linux 5.14 maps, 6.1 puts small pages
    together); then pages come at their first touch. Ends early when it is not wanted any more."""
    advise = _advise()
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    stop = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    for at in range(start, stop, _STEP_BYTES):
        length = min(_STEP_BYTES, stop - at)
        if not is_wanted():
            return
        if huge:
            advise(at, length, _HUGEPAGE)
            # Whoever's memory has no run that is long enough is not asked again: the kernel would
            # look for one each time.
            huge = advise(at, length, _COLLAPSE) not in (errno.ENOMEM, errno.EBUSY)
        if advise(at, length, _POPULATE_WRITE):
            return


def _advise() -> Callable[[int, int, int], int]:
    """madvise; the answer is an errno, or 0."""
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    def call(address: int, length: int, advice: int) -> int:
        return 0 if madvise(address, length, advice) == 0 else ctypes.get_errno()

    return call

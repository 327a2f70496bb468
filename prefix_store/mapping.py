"""Maps shared memory where large pages fit.

A large page can be mapped as one only where address and offset leave the same rest. Python's mmap
takes no address, so this is done through ctypes.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

LARGE_PAGE_BYTES = 2 * 1024**2
"""On x86-64, and on AArch64 with the usual small pages; elsewhere pages stay small."""

_NO_ACCESS = 0
_FIXED = 0x10
_NO_RESERVE = 0x4000
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
]  # fmt: skip
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def map_shared(fd: int, num_bytes: int) -> memoryview:
    """A file's first bytes, writable; unmapped when nobody refers to the view or a part of it any
    more. Raises OSError."""
    length = _up(num_bytes, mmap.PAGESIZE)
    # More than needed, of which the part that is aligned is then replaced.
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    start = _map(None, length + LARGE_PAGE_BYTES, _NO_ACCESS, private, -1)
    stop = start + length + LARGE_PAGE_BYTES
    at = _up(start, LARGE_PAGE_BYTES)
    try:
        _map(at, length, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _FIXED, fd)
    except OSError:
        _unmap(start, stop)
        raise
    _unmap(start, at)
    _unmap(at + length, stop)
    memory = (ctypes.c_char * num_bytes).from_address(at)
    # Not at the interpreter's end: other threads may still copy then.
    weakref.finalize(memory, _unmap, at, at + length).atexit = False
    return memoryview(memory).cast("B")


def _map(address: int | None, length: int, access: int, flags: int, fd: int) -> int:
    at = _libc.mmap(address, length, access, flags, fd, 0)
    if at is None or at == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(at)


def _unmap(start: int, stop: int) -> None:
    if stop > start:
        _libc.munmap(start, stop - start)


def _up(number: int, step: int) -> int:
    return -(-number // step) * step

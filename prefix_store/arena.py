"""The shared memory that holds KV bytes.

It is an anonymous file (memfd) whose descriptor the store passes over its Unix socket. It has no
name, so nothing is left behind however the processes die, and an engine's mapping stays readable
while the engine uses it, even when the store is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import os

from prefix_store.base import StoreError
from prefix_store.mapping import map_shared
from prefix_store.prefault import prefault


class ArenaMemoryError(StoreError):
    """The machine does not have the memory that the arena was configured with."""


class Arena:
    """A mapping of the arena. Offsets are bytes from its start."""

    def __init__(self, fd: int, num_bytes: int) -> None:
        """Takes the descriptor over, also when this raises OSError."""
        try:
            self.view = map_shared(fd, num_bytes)
        except OSError:
            os.close(fd)
            raise
        self.fd = fd
        self.num_bytes = num_bytes
        self._is_closed = False

    @classmethod
    def create(cls, num_bytes: int) -> Arena:
        """A new arena whose memory is really there. Raises ArenaMemoryError."""
        fd = os.memfd_create("headstart-arena", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, num_bytes)
        except OSError as error:
            os.close(fd)
            raise ArenaMemoryError(
                f"store.memory.capacity: {num_bytes / 2**30:.1f} GiB of shared memory cannot be "
                f"had on this machine ({error.strerror}); lower it"
            ) from error
        return cls(fd, num_bytes)

    def enlarge_pages(self) -> None:
        """Have the kernel keep the arena in large pages, where it can, and map them: memory that
        was idle is then up to four times as fast to touch (`python -m bench.idle_memory`). For the
        arena's owner; takes some seconds for each GiB. Ends when the arena is closed."""
        self._prefault(huge=True)

    def populate(self) -> None:
        """Map every page now instead of at the first touch of each: a load that runs into thousands
        of page faults takes twice as long. Takes about half a second for each GiB of small pages;
        other threads go on. Ends when the arena is closed."""
        self._prefault(huge=False)

    def close_descriptor(self) -> None:
        """The mapping stays until nobody refers to it any more: threads that still read it need no
        lock. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def close(self) -> None:
        """Unmap at once; nobody may use `view` any more. Idempotent."""
        self.close_descriptor()
        self._is_closed = True
        with contextlib.suppress(BufferError, ValueError):
            self.view.release()

    def _prefault(self, *, huge: bool) -> None:
        memory = ctypes.c_char.from_buffer(self.view)
        prefault(
            ctypes.addressof(memory),
            self.num_bytes,
            huge=huge,
            is_wanted=lambda: not self._is_closed,
        )

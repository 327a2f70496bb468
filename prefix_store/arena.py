"""The shared memory that holds KV bytes.

It is an anonymous file (memfd) whose descriptor the store passes over its Unix socket. It has no
name, so nothing is left behind however the processes die, and an engine's mapping stays readable
while the engine uses it, even when the store is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import os

from prefix_store.available_memory import available_bytes
from prefix_store.base import StoreError
from prefix_store.mapping import LARGE_PAGE_BYTES, map_shared
from prefix_store.prefault import prefault, use_large_pages


class ArenaMemoryError(StoreError):
    """The machine does not have the memory that the arena was configured with."""

    def __init__(self, num_bytes: int, reason: str) -> None:
        super().__init__(
            f"store.memory.capacity: {num_bytes / 2**30:.1f} GiB of shared memory cannot be had on "
            f"this machine ({reason}); lower it"
        )


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
        """A new arena whose memory is really there, in large pages as far as the machine has them.
        Takes about half a second for each GiB. Raises ArenaMemoryError."""
        available = available_bytes()
        if available is not None and num_bytes > available:
            # The kernel would not refuse: it would end some process when nothing is left.
            raise ArenaMemoryError(num_bytes, f"{available / 2**30:.1f} GiB are available")
        fd = os.memfd_create("headstart-arena", os.MFD_CLOEXEC)
        os.ftruncate(fd, num_bytes)
        arena = None
        try:
            arena = cls(fd, num_bytes)
            arena._allocate()
        except OSError as error:
            if arena is not None:
                arena.close()
            raise ArenaMemoryError(num_bytes, error.strerror or str(error)) from error
        return arena

    def populate(self) -> None:
        """Map every page now instead of at the first touch of each: a load that runs into thousands
        of page faults takes twice as long. Takes half a second for each GiB of small pages; other
        threads go on. Ends when the arena is closed."""
        memory = ctypes.c_char.from_buffer(self.view)  # keeps it mapped
        prefault(ctypes.addressof(memory), self.num_bytes, is_wanted=lambda: not self._is_closed)

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

    def _allocate(self) -> None:
        # A page in each large one, so that the kernel has little to copy and clears the rest.
        for start in range(0, self.num_bytes, LARGE_PAGE_BYTES):
            os.posix_fallocate(self.fd, start, 1)
        memory = ctypes.c_char.from_buffer(self.view)
        use_large_pages(ctypes.addressof(memory), self.num_bytes)
        os.posix_fallocate(self.fd, 0, self.num_bytes)

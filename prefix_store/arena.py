"""The shared memory that holds KV bytes.

It is an anonymous file (memfd) whose descriptor the store passes over its Unix socket. It has no
name, so nothing is left behind however the processes die, and an engine's mapping stays readable
while the engine uses it, even when the store is gone.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading

from prefix_store.base import StoreError


class ArenaMemoryError(StoreError):
    """The machine does not have the memory that the arena was configured with."""


class Arena:
    """A mapping of the arena. Offsets are bytes from its start."""

    def __init__(self, fd: int, num_bytes: int) -> None:
        """Takes the descriptor over."""
        self.fd = fd
        self.num_bytes = num_bytes
        self._map = mmap.mmap(fd, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self.view = memoryview(self._map)

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

    def populate(self) -> threading.Thread:
        """Map every page now, in a thread of its own, instead of at the first touch of each: a
        load that runs into thousands of page faults takes twice as long."""
        thread = threading.Thread(target=self._populate, name="headstart-populate", daemon=True)
        thread.start()
        return thread

    def _populate(self) -> None:
        step = 16 * mmap.PAGESIZE * 256
        advice = getattr(mmap, "MADV_POPULATE_WRITE", 23)
        for start in range(0, self.num_bytes, step):
            try:
                self._map.madvise(advice, start, min(step, self.num_bytes - start))
            except (OSError, ValueError):
                return  # an old kernel, or closed meanwhile: pages come at their first touch

    def close_descriptor(self) -> None:
        """The mapping stays until nobody refers to it any more: threads that still read it need no
        lock. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def close(self) -> None:
        """Unmap at once; nobody may use `view` any more. Idempotent."""
        self.close_descriptor()
        with contextlib.suppress(BufferError, ValueError):
            self.view.release()
            self._map.close()

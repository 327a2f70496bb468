"""The directory of a disk tier: ours alone, and recognised as ours.

    <path>/headstart-disk-tier     marker, locked by the store that uses the directory
    <path>/blocks/                 the files of the records, open to their owner only

A directory that holds anything but has no marker belongs to somebody else and is refused. Only
`blocks` is ever cleaned up.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import ExitStack, suppress
from pathlib import Path

from prefix_store.base import StoreError

MARKER = "headstart-disk-tier"
MARKER_TEXT = b"Blocks of a Headstart store, format 1. Safe to remove when no store runs.\n"
BLOCKS = "blocks"
_HARMLESS = {"lost+found"}  # in every new ext4 file system


class DiskDirectory:
    """The open and locked directory. Calls of the operating system only; no method keeps state."""

    def __init__(self, lock: int, blocks: int) -> None:
        self._lock = lock
        self.blocks = blocks
        """Descriptor of the directory of the files."""

    @classmethod
    def open(cls, path: Path) -> DiskDirectory:
        """Make it when it is new. Raises StoreError when it cannot be used."""
        path = path.expanduser().absolute()
        try:
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            root = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise _refused(path, f"is no directory that we can use ({error.strerror})") from None
        try:
            return cls._open_in(root, path)
        except OSError as error:
            raise _refused(path, f"cannot be used ({error.strerror})") from None
        finally:
            os.close(root)

    @classmethod
    def _open_in(cls, root: int, path: Path) -> DiskDirectory:
        with ExitStack() as opened:
            lock = _open_marker(root, path)
            opened.callback(os.close, lock)
            _lock(lock, path)
            with suppress(FileExistsError):
                os.mkdir(BLOCKS, 0o700, dir_fd=root)
            blocks = os.open(BLOCKS, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=root)
            opened.callback(os.close, blocks)
            os.fchmod(blocks, 0o700)
            opened.pop_all()
        return cls(lock, blocks)

    @property
    def block_bytes(self) -> int:
        """What the file system gives files their room in."""
        return max(4096, os.fstatvfs(self.blocks).f_frsize)

    @property
    def free_bytes(self) -> int:
        """That the file system has left for us."""
        status = os.fstatvfs(self.blocks)
        return status.f_bavail * status.f_frsize

    def close(self) -> None:
        os.close(self.blocks)
        os.close(self._lock)


def _open_marker(root: int, path: Path) -> int:
    """To read only: a descriptor for writing would keep the file system from being remounted."""
    flags = os.O_RDWR | os.O_NOFOLLOW  # whether we may write is seen here
    try:
        marker = os.open(MARKER, flags, dir_fd=root)
    except FileNotFoundError:
        if set(os.listdir(root)) - _HARMLESS:
            raise _refused(path, "holds other files and was not made by a store") from None
        marker = os.open(MARKER, flags | os.O_CREAT, 0o600, dir_fd=root)
    try:
        text = os.pread(marker, len(MARKER_TEXT) + 1, 0)
        if len(text) < len(MARKER_TEXT) and MARKER_TEXT.startswith(text):
            os.pwrite(marker, MARKER_TEXT, 0)  # new, or its maker was killed
        elif text != MARKER_TEXT:
            raise _refused(path, "was made by another version of Headstart")
    finally:
        os.close(marker)
    return os.open(MARKER, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=root)


def _lock(marker: int, path: Path) -> None:
    try:
        fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _refused(path, "is in use by another store") from None


def _refused(path: Path, why: str) -> StoreError:
    return StoreError(
        f"store.disk.path: {path} {why}; name an empty or new directory that only this store uses"
    )

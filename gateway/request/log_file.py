"""A file of lines that is rotated by size: PATH, then PATH.1 (newest of the old) to PATH.keep."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

_STEP = 64 * 1024


class LogFile:
    """Whole lines only, also after a full disk or a crash. One writer; readable for its owner
    alone. Every method but `close` raises OSError, after which the next write opens it again."""

    def __init__(self, path: Path, *, max_bytes: int, keep: int) -> None:
        """A line that is longer than `max_bytes` has a file of its own. `keep`: old files."""
        self._path = path
        self._max_bytes = max_bytes
        self._keep = keep
        self._fd: int | None = None
        self._size = 0

    def open(self) -> None:
        """Make it, or go on behind the last whole line."""
        if self._fd is not None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # O_NONBLOCK: a named pipe would hold us up for ever.
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(self._path, flags, 0o600)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise OSError(f"{self._path} is not a file")
            os.fchmod(fd, 0o600)
            self._size = _end_of_last_line(fd)
            os.ftruncate(fd, self._size)
        except OSError:
            os.close(fd)
            raise
        self._fd = fd

    def write(self, lines: list[bytes]) -> None:
        """Each with its line feed. After an error none or some of them are there, whole."""
        waiting = b""
        for line in lines:
            if self._fd is None:
                self.open()
            size = self._size + len(waiting)
            if size and size + len(line) > self._max_bytes:
                self._append(waiting)
                waiting = b""
                self._rotate()
            waiting += line
        self._append(waiting)

    def close(self) -> None:
        """Idempotent."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _append(self, data: bytes) -> None:
        if not data:
            return
        if self._fd is None:
            self.open()
        assert self._fd is not None
        written = 0
        try:
            while written < len(data):
                written += os.write(self._fd, data[written:])
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size)
            self.close()
            raise
        self._size += len(data)

    def _rotate(self) -> None:
        self.close()
        if not self._keep:
            self._path.unlink(missing_ok=True)
        for number in range(self._keep, 0, -1):
            older = self._numbered(number)
            newer = self._numbered(number - 1) if number > 1 else self._path
            with contextlib.suppress(FileNotFoundError):
                newer.replace(older)
        self.open()

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")


def _end_of_last_line(fd: int) -> int:
    """Offset behind the last line feed; what follows was torn by a crash."""
    end = os.fstat(fd).st_size
    while end:
        start = max(0, end - _STEP)
        found = os.pread(fd, end - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0

"""Notices that a file has changed, also when it was replaced by another one."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class _Stamp:
    modified_ns: int
    num_bytes: int
    inode: int


class FileStamp:
    """`take` it before the file is read, so that no change after that is missed; then `changed`
    tells, asked again and again."""

    def __init__(self, path: Path | None) -> None:
        """None: nothing ever changes."""
        self._path = path
        self._taken = self._last = self._look()

    def take(self) -> None:
        """The file as it is now is known."""
        self._taken = self._last = self._look()

    def changed(self) -> bool:
        """The file has changed and has rested for one look: many writers empty a file first, and
        half a file may be a valid one."""
        last, self._last = self._last, self._look()
        return self._last == last and self._last != self._taken

    def _look(self) -> _Stamp | None:
        """None while the file is away: editors replace files."""
        if self._path is None:
            return None
        try:
            status = os.stat(self._path)
        except OSError:
            return None
        return _Stamp(status.st_mtime_ns, status.st_size, status.st_ino)

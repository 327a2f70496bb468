"""Digests of large files, remembered in the user's cache, so that they are read once."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import xxhash

CHUNK_BYTES = 16 * 1024**2
_HEX_CHARS = 32


def remembered_digest(kind: str, files: Sequence[Path], compute: Callable[[], str]) -> str:
    """What `compute` says of `files` (32 hex digits), or said when they were last the same: same
    paths, inodes, sizes and times. `kind` keeps digests of different sorts apart. Raises OSError.
    """
    remembered = _cache_dir(kind) / file_stamp(files)
    try:
        digest = remembered.read_text()
    except (OSError, ValueError):
        digest = ""
    if len(digest) != _HEX_CHARS:
        digest = compute()
        _remember(remembered, digest)
    return digest


def file_stamp(files: Sequence[Path]) -> str:
    """Changes when any of the files does. The time of change is in it, which nobody can set back.
    Raises OSError."""
    stamp = xxhash.xxh3_128()
    for file in files:
        status = file.stat()
        times = f"{status.st_mtime_ns}\0{status.st_ctime_ns}"
        which = f"{status.st_dev}\0{status.st_ino}\0{status.st_size}"
        stamp.update(os.fsencode(file.absolute()) + f"\0{which}\0{times}\0".encode())
    return stamp.hexdigest()


def _cache_dir(kind: str) -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "headstart" / kind


def _remember(path: Path, digest: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(digest)
        partial.replace(path)
    except OSError:
        return  # a read-only cache costs time at the next start, nothing else

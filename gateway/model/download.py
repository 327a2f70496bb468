"""Downloads one file over HTTP so that it can be interrupted and goes on where it stopped."""

from __future__ import annotations

import hashlib
import http.client
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gateway.settings.user_error import UserError

Progress = Callable[[int], None]
"""Called with the bytes that are there so far."""

CHUNK_BYTES = 256 * 1024
TIMEOUT_S = 60.0
TRIES = 5
HTTP_PARTIAL = 206
HTTP_RANGE_NOT_SATISFIABLE = 416


class DownloadError(UserError):
    """The file could not be had from there; what came stays for the next try."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file whose content is known before it comes."""

    url: str
    num_bytes: int
    sha256: str


def download(
    remote: RemoteFile,
    target: Path,
    *,
    progress: Progress,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Put the file at `target`, atomically and checked. `target`.part keeps what came so far.

    The proxies and certificates are those of urllib: the environment's. Raises DownloadError.
    """
    part = target.with_name(target.name + ".part")
    fresh_starts = 0
    for attempt in range(1, TRIES + 1):
        try:
            _fetch_rest(remote, part, progress)
        except (OSError, http.client.HTTPException) as error:
            if attempt == TRIES or _is_final(error):
                raise DownloadError(f"{remote.url}: {_reason(error)}") from error
            pause(min(2.0 ** (attempt - 1), 10.0))
            continue
        if part.stat().st_size == remote.num_bytes and sha256_of(part) == remote.sha256:
            os.replace(part, target)
            return
        # Complete and wrong, or too long: no use in going on from it.
        part.unlink()
        fresh_starts += 1
        if fresh_starts == 2:
            break
    raise DownloadError(
        f"{remote.url}: is not the file that was expected ({remote.num_bytes} bytes, "
        f"sha256 {remote.sha256[:16]}...); does a proxy change it?"
    )


def _fetch_rest(remote: RemoteFile, part: Path, progress: Progress) -> None:
    """Append what is missing. Raises OSError when the connection ends too early."""
    have = part.stat().st_size if part.exists() else 0
    if have >= remote.num_bytes:
        return
    request = urllib.request.Request(remote.url)
    if have:
        request.add_header("Range", f"bytes={have}-")
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
        if have and response.status != HTTP_PARTIAL:
            have = 0  # the server sends the whole file again
        with part.open("r+b" if have else "wb") as out:
            out.seek(have)
            progress(have)
            while have < remote.num_bytes and (chunk := response.read(CHUNK_BYTES)):
                out.write(chunk)
                have += len(chunk)
                progress(have)
    if have < remote.num_bytes:
        raise ConnectionResetError(f"the connection ended after {have} bytes")


def sha256_of(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_final(error: Exception) -> bool:
    """A refusal that no second try will change."""
    if not isinstance(error, urllib.error.HTTPError):
        return False
    return 400 <= error.code < 500 and error.code not in (408, 429, HTTP_RANGE_NOT_SATISFIABLE)


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"the server answered {error.code} {error.reason}"
    if isinstance(error, urllib.error.URLError):
        return str(error.reason)
    return str(error) or type(error).__name__

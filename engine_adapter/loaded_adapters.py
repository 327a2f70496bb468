"""What the LoRA adapters of a running engine are, told from their files.

vLLM says the name, a number and the path of a request's adapter. Names and numbers are used again
for other weights, and files may be replaced after they were loaded: vLLM reads them at the start,
again whenever its cache of adapters dropped one, and at every step for one that was loaded "in
place". So files count only while they are as they were when the engine began: then it is the same
content whenever it was loaded.
"""

from __future__ import annotations

import logging
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from engine_adapter.adapters import AdapterError, adapter_digest, adapter_files
from engine_adapter.remembered_digests import file_stamp

logger = logging.getLogger(__name__)

MAX_ADAPTERS = 1024
"""Paths that are told apart; more are not stored."""


class LoraRequest(Protocol):
    """The fields of vLLM's LoRARequest that are read."""

    lora_name: str
    lora_path: str
    is_3d_lora_weight: bool


@dataclass(frozen=True, slots=True)
class _Seen:
    stamp: str
    digest: str | None
    """None: not to be used again in this life of the engine."""


def digest_in(identity: str) -> str:
    """The digest alone, by which the adapter is known to gateways."""
    return identity.partition("/")[0]


class LoadedAdapters:
    """Paths -> digests. For the scheduler's thread."""

    def __init__(
        self, began_ns: int, dtype: str = "", digest_of: Callable[[Path], str] = adapter_digest
    ) -> None:
        """`began_ns`: time.time_ns() before the engine loaded any adapter. `dtype`: to which the
        engine converts their weights."""
        self._began_ns = began_ns
        self._dtype = dtype
        self._digest_of = digest_of
        self._seen: dict[str, _Seen] = {}

    def identity(self, lora: LoraRequest | None) -> str | None:
        """Of what the engine computes with: digest/dtype (see `digest_in`), empty for the base
        model, None when it is not certain. An adapter that was uncertain once stays so: blocks of
        its older content may be left in the engine's own cache."""
        if lora is None:
            return ""
        seen = self._seen.get(lora.lora_path)
        if seen is None and len(self._seen) >= MAX_ADAPTERS:
            return None
        if seen is None or seen.digest is not None:
            try:
                seen = self._look(Path(lora.lora_path).expanduser(), seen)
            except (AdapterError, OSError) as error:
                logger.warning("adapter %s is not stored: %s", lora.lora_name, error)
                seen = _Seen("", None)
            self._seen[lora.lora_path] = seen
        if seen.digest is None:
            return None
        identity = f"{seen.digest}/{self._dtype}"
        # Weights of experts that lie in another way.
        return f"{identity}/3d" if lora.is_3d_lora_weight else identity

    def _look(self, path: Path, seen: _Seen | None) -> _Seen:
        before = self._stamp(path)
        if seen is not None and seen.stamp == before:
            return seen
        found = _Seen(before, self._digest_of(path))
        if seen is not None or self._stamp(path) != before:
            raise AdapterError(f"{path} changed while the engine ran; start it again to store it")
        return found

    def _stamp(self, path: Path) -> str:
        """Of its files as they are. AdapterError when they may be others than those loaded."""
        files = adapter_files(path)
        times = [each.stat().st_ctime_ns for each in (path, *files)]
        times += [link.lstat().st_ctime_ns for file in files for link in _links_to(file)]
        if max(times) >= self._began_ns:
            raise AdapterError(
                f"{path} is newer than this engine, so nothing says what it has loaded; start the "
                "engine again to store it"
            )
        return file_stamp(files)


def _links_to(file: Path) -> Iterator[Path]:
    """Every symbolic link on the way to a file: each may be turned to another place."""
    followed: set[Path] = set()
    ahead = [file.absolute()]
    while ahead:
        path = ahead.pop()
        for each in (path, *path.parents):
            if each not in followed and stat.S_ISLNK(each.lstat().st_mode):
                followed.add(each)
                yield each
                ahead.append(each.parent / each.readlink())

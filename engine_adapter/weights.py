"""The identity of a model's weights: two engines may exchange KV bytes only when it is equal."""

from __future__ import annotations

import os
from pathlib import Path

import xxhash

from engine_adapter.base import EngineAdapterError

_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf", ".json")
_NOT_WEIGHTS = ("tokenizer", "special_tokens", "vocab", "generation_config", "headstart", "chat_")
_CHUNK_BYTES = 16 * 1024**2


class WeightsError(EngineAdapterError):
    """The weights cannot be identified, so nothing may be stored or loaded."""


def weights_digest(path: Path) -> str:
    """Hex digest over every byte of the weights and of the model's configuration (tokenizer files
    do not matter: blocks are keyed by token ids). A digest is remembered in the user's cache under
    the files' names, sizes and times, so only the first start reads everything.

    Raises WeightsError when there are no weights at `path`.
    """
    files = [path] if path.is_file() else sorted(path.iterdir()) if path.is_dir() else []
    files = [
        file
        for file in files
        if file.suffix in _SUFFIXES and not file.name.startswith(_NOT_WEIGHTS)
    ]
    if not any(file.suffix != ".json" for file in files):
        raise WeightsError(f"{path}: no weights here; the store is not used for this engine")
    stamp = xxhash.xxh3_128()
    for file in files:
        status = file.stat()
        stamp.update(
            f"{file.absolute()}\0{status.st_size}\0{status.st_mtime_ns}\0{status.st_ino}\0".encode()
        )
    remembered = _cache_dir() / stamp.hexdigest()
    try:
        digest = remembered.read_text()
    except OSError:
        digest = ""
    if len(digest) != 32:
        digest = _read_all(files)
        _remember(remembered, digest)
    return digest


def _read_all(files: list[Path]) -> str:
    digest = xxhash.xxh3_128()
    for file in files:
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as source:
            while chunk := source.read(_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()


def _cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "headstart" / "weights"


def _remember(path: Path, digest: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(digest)
        partial.replace(path)
    except OSError:
        return  # a read-only cache costs time at the next start, nothing else

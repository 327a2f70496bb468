"""The identity of a model's weights: two engines may exchange KV bytes only when it is equal."""

from __future__ import annotations

from pathlib import Path

import xxhash

from engine_adapter.base import EngineAdapterError
from engine_adapter.remembered_digests import CHUNK_BYTES, remembered_digest

_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf", ".json")
_NOT_WEIGHTS = ("tokenizer", "special_tokens", "vocab", "generation_config", "headstart", "chat_")


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
    return remembered_digest("weights", files, lambda: _read_all(files))


def _read_all(files: list[Path]) -> str:
    digest = xxhash.xxh3_128()
    for file in files:
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as source:
            while chunk := source.read(CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()

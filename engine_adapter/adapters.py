"""The identity of a LoRA adapter: what its weights say, not what it is called or where it lies.

The files are those of PEFT, as vLLM reads them: adapter_config.json beside
adapter_model.safetensors, or else adapter_model.bin, or else adapter_model.pt.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import xxhash

from engine_adapter.base import EngineAdapterError
from engine_adapter.remembered_digests import CHUNK_BYTES, remembered_digest

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""The first one that is there is the one that vLLM loads."""

MAX_CONFIG_BYTES = 1024**2

_IRRELEVANT = frozenset(
    {
        "base_model_name_or_path",
        "revision",
        "auto_mapping",
        "task_type",
        "inference_mode",
        "peft_version",
        "lora_dropout",  # of training
    }
)
"""Keys of adapter_config.json that change nothing of the result. All others count, also those
that are not known here: rather a miss than the wrong blocks."""

_UNORDERED = ("target_modules", "modules_to_save", "exclude_modules")
"""Sets, which PEFT writes in any order."""


class AdapterError(EngineAdapterError):
    """The adapter cannot be identified, so nothing of it may be stored or loaded."""


class _Ranks(msgspec.Struct):
    r: int
    rank_pattern: dict[str, int] | None = None


def adapter_files(path: Path) -> tuple[Path, Path]:
    """Its configuration and its weights. Raises AdapterError where one is missing."""
    config = path / CONFIG
    weights = next((path / name for name in WEIGHTS if (path / name).is_file()), None)
    if not config.is_file():
        raise AdapterError(f"{path}: no adapter here ({CONFIG} is missing)")
    if weights is None:
        raise AdapterError(f"{path}: no adapter here (none of {', '.join(WEIGHTS)})")
    return config, weights


def adapter_digest(path: Path) -> str:
    """32 hex digits over every byte of the weights and over what of the configuration changes the
    result. Remembered in the user's cache while the files stay as they are; else it reads all of
    them, so call it where that may take a second. Raises AdapterError."""
    config, weights = adapter_files(path)
    try:
        return remembered_digest("adapters", (config, weights), lambda: _digest(config, weights))
    except OSError as error:
        raise AdapterError(f"{path}: the adapter cannot be read: {error}") from error


def adapter_rank(path: Path) -> int:
    """Its largest rank. Raises AdapterError."""
    config, _ = adapter_files(path)
    try:
        ranks = msgspec.json.decode(_read_config(config), type=_Ranks)
    except (OSError, msgspec.MsgspecError) as error:
        raise AdapterError(f"{config}: no rank can be read from it: {error}") from error
    return max([ranks.r, *(ranks.rank_pattern or {}).values()])


def _digest(config: Path, weights: Path) -> str:
    digest = xxhash.xxh3_128()
    digest.update(_relevant(config) + b"\0" + weights.suffix.encode() + b"\0")
    with weights.open("rb") as source:
        while chunk := source.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _relevant(config: Path) -> bytes:
    """The configuration in one form: keys that count, in order, without what is off anyway."""
    try:
        fields = msgspec.json.decode(_read_config(config), type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise AdapterError(f"{config}: not a JSON object: {error}") from error
    kept = {
        key: sorted(value, key=str) if key in _UNORDERED and isinstance(value, list) else value
        for key, value in sorted(fields.items())
        if key not in _IRRELEVANT and not _is_off(value)
    }
    # Patterns inside are tried in the order in which they stand, so that order counts.
    return msgspec.json.encode(kept)


def _is_off(value: Any) -> bool:
    """As good as absent: newer versions of PEFT write out more defaults."""
    return value is None or value is False or value in ("", [], {})


def _read_config(config: Path) -> bytes:
    with config.open("rb") as source:
        raw = source.read(MAX_CONFIG_BYTES + 1)
    if len(raw) > MAX_CONFIG_BYTES:
        raise AdapterError(f"{config}: larger than {MAX_CONFIG_BYTES} bytes")
    return raw

"""Reads headstart.yaml: strictly, with line numbers, and every mistake in a plain sentence."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from gateway.settings.config_errors import ConfigError, explain
from gateway.settings.yaml_document import YamlDocument
from policies.config import HeadstartConfig

__all__ = ["ConfigError", "find_config", "load_config", "parse_config", "read_text", "validated"]

DEFAULT_FILE = Path("headstart.yaml")
MAX_BYTES = 1024 * 1024

Model = TypeVar("Model", bound=BaseModel)


def find_config(explicit: str | None) -> Path | None:
    """The file that was asked for, else ./headstart.yaml where it exists, else None."""
    if explicit is not None:
        return Path(explicit)
    return DEFAULT_FILE if DEFAULT_FILE.is_file() else None


def load_config(path: Path | None) -> HeadstartConfig:
    """The validated configuration; None gives the built-in defaults. Raises ConfigError."""
    if path is None:
        return HeadstartConfig()
    return parse_config(read_text(path), source=str(path))


def read_text(path: Path) -> str:
    """Of a file for people. Raises ConfigError."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{path}: larger than 1 MiB; is this the right file?")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start})") from error


def parse_config(text: str, *, source: str) -> HeadstartConfig:
    """Like load_config for a text; `source` names it in errors."""
    document = YamlDocument.parse(text, source)
    data = {} if document.data is None else document.data
    if not isinstance(data, dict):
        raise ConfigError(f"{source}: must be a mapping of keys to values, such as `store: ...`")
    return validated(HeadstartConfig, data, document)


def validated(model: type[Model], data: Any, document: YamlDocument) -> Model:
    """`data`, which stands in `document`. Raises ConfigError, which names the line of each
    mistake."""
    try:
        return model.model_validate(data)
    except ValidationError as invalid:
        sentences = []
        for mistake in _without_echoes(invalid.errors(include_url=False)):
            where, sentence = explain(model, data, mistake)
            sentences.append((document.line_of(where), sentence))
        sentences.sort(key=lambda each: each[0] or 0)
        lines = [f"{document.place(line)}: {sentence}" for line, sentence in sentences]
        raise ConfigError("\n".join(lines)) from None


def _without_echoes(mistakes: list[ErrorDetails]) -> Iterator[ErrorDetails]:
    """A list whose entries are all wrong is also called too short: leave that out."""
    for mistake in mistakes:
        depth = len(mistake["loc"])
        below = (
            m for m in mistakes if len(m["loc"]) > depth and m["loc"][:depth] == mistake["loc"]
        )
        if mistake["type"] != "too_short" or next(below, None) is None:
            yield mistake

"""Reads headstart.yaml: strictly, with line numbers, and every mistake in a plain sentence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from gateway.settings.config_errors import Location, explain
from gateway.settings.user_error import UserError
from policies.config import HeadstartConfig

DEFAULT_FILE = Path("headstart.yaml")
MAX_BYTES = 1024 * 1024


class ConfigError(UserError):
    """The configuration cannot be used. The message names each key to mend, one a line."""


def find_config(explicit: str | None) -> Path | None:
    """The file that was asked for, else ./headstart.yaml where it exists, else None."""
    if explicit is not None:
        return Path(explicit)
    return DEFAULT_FILE if DEFAULT_FILE.is_file() else None


def load_config(path: Path | None) -> HeadstartConfig:
    """The validated configuration; None gives the built-in defaults. Raises ConfigError."""
    if path is None:
        return HeadstartConfig()
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{path}: larger than 1 MiB; is this the right file?")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start})") from error
    return parse_config(text, source=str(path))


def parse_config(text: str, *, source: str) -> HeadstartConfig:
    """Like load_config for a text; `source` names it in errors."""
    document = _parse(text, source)
    if document.mistakes:
        raise ConfigError("\n".join(document.mistakes))
    try:
        return HeadstartConfig.model_validate(document.data)
    except ValidationError as invalid:
        sentences = []
        for mistake in _without_echoes(invalid.errors(include_url=False)):
            where, sentence = explain(HeadstartConfig, document.data, mistake)
            sentences.append((document.line_of(where), sentence))
        sentences.sort(key=lambda each: each[0] or 0)
        lines = [f"{_place(source, line)}: {sentence}" for line, sentence in sentences]
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


def _place(source: str, line: int | None) -> str:
    return source if line is None else f"{source} line {line}"


@dataclass(slots=True)
class _Document:
    """The values of a YAML text and where each stands."""

    data: Any = None
    lines: dict[Location, int] = field(default_factory=dict)
    mistakes: list[str] = field(default_factory=list)

    def line_of(self, where: Location) -> int | None:
        """The line of a key; of what surrounds it when the key is not there."""
        while where and where not in self.lines:
            where = where[:-1]
        return self.lines.get(where)


def _parse(text: str, source: str) -> _Document:
    loader = yaml.SafeLoader(text)
    document = _Document()
    try:
        root = loader.get_single_node()
        if root is not None:
            _walk(root, (), document, source, set())
            if not document.mistakes:
                document.data = loader.construct_document(root)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else None
        raise ConfigError(f"{_place(source, line)}: not valid YAML: {error.problem}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: not valid YAML: {error}") from error
    finally:
        loader.dispose()
    if document.data is None:
        document.data = {}
    elif not isinstance(document.data, dict):
        raise ConfigError(f"{source}: must be a mapping of keys to values, such as `store: ...`")
    return document


def _walk(
    node: yaml.Node, where: Location, document: _Document, source: str, above: set[int]
) -> None:
    """Note the line of every key and find keys that stand twice (YAML itself takes the last)."""
    if id(node) in above:
        raise ConfigError(f"{_place(source, node.start_mark.line + 1)}: refers to itself")
    above = above | {id(node)}
    document.lines.setdefault(where, node.start_mark.line + 1)
    if isinstance(node, yaml.SequenceNode):
        for index, child in enumerate(node.value):
            _walk(child, (*where, index), document, source, above)
    elif isinstance(node, yaml.MappingNode):
        first_lines: dict[str, int] = {}
        for key, child in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in first_lines:
                path = ".".join(str(part) for part in (*where, name))
                document.mistakes.append(
                    f"{_place(source, line)}: {path}: stands twice (first in line "
                    f"{first_lines[name]}); remove one"
                )
            first_lines.setdefault(name, line)
            document.lines[*where, name] = line
            _walk(child, (*where, name), document, source, above)

"""A YAML text: its values, and the line in which each stands."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import yaml

from gateway.settings.config_errors import ConfigError, Location


@dataclass(slots=True)
class YamlDocument:
    """What `parse` found. Keys that stand twice are refused (YAML itself takes the last)."""

    source: str
    """Names it in errors."""
    data: Any = None
    """None for a text without values."""
    lines: dict[Location, int] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str, source: str, at: Location = ()) -> YamlDocument:
        """`at`: where in the configuration the text stands, for errors and lines. Raises
        ConfigError."""
        document = cls(source)
        mistakes: list[str] = []
        loader = yaml.SafeLoader(text)
        try:
            root = loader.get_single_node()
            if root is not None:
                document._walk(root, at, mistakes, set())
                if not mistakes:
                    document.data = loader.construct_document(root)
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else None
            problem = f"{document.place(line)}: not valid YAML: {error.problem}"
            raise ConfigError(problem) from error
        except yaml.YAMLError as error:
            raise ConfigError(f"{source}: not valid YAML: {error}") from error
        finally:
            loader.dispose()
        if mistakes:
            raise ConfigError("\n".join(mistakes))
        return document

    def line_of(self, where: Location) -> int | None:
        """The line of a key; of what surrounds it when the key is not there."""
        while where and where not in self.lines:
            where = where[:-1]
        return self.lines.get(where)

    def place(self, line: int | None) -> str:
        """As errors begin."""
        return self.source if line is None else f"{self.source} line {line}"

    def _walk(self, node: yaml.Node, where: Location, mistakes: list[str], above: set[int]) -> None:
        """Note the line of every key and find keys that stand twice."""
        if id(node) in above:
            raise ConfigError(f"{self.place(node.start_mark.line + 1)}: refers to itself")
        above = above | {id(node)}
        self.lines.setdefault(where, node.start_mark.line + 1)
        if isinstance(node, yaml.SequenceNode):
            for index, child in enumerate(node.value):
                self._walk(child, (*where, index), mistakes, above)
        elif isinstance(node, yaml.MappingNode):
            first_lines: dict[str, int] = {}
            for key, child in node.value:
                name, line = str(key.value), key.start_mark.line + 1
                if name in first_lines:
                    path = ".".join(str(part) for part in (*where, name))
                    mistakes.append(
                        f"{self.place(line)}: {path}: stands twice (first in line "
                        f"{first_lines[name]}); remove one"
                    )
                first_lines.setdefault(name, line)
                self.lines[*where, name] = line
                self._walk(child, (*where, name), mistakes, above)

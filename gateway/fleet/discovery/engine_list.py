"""Reads a file that lists replicas, with the errors of headstart.yaml."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gateway.settings.config_errors import ConfigError
from gateway.settings.config_file import read_text, validated
from gateway.settings.yaml_document import YamlDocument
from policies.base import Settings
from policies.config import HeadstartConfig
from policies.engine import EngineConfig


class _EngineList(Settings):
    """As in the configuration, where it stands under this key."""

    engines: tuple[EngineConfig, ...]


def read_engines(
    path: Path, config: HeadstartConfig, template: EngineConfig
) -> tuple[EngineConfig, ...]:
    """The replicas that a file lists; the template says what an entry does not. Raises
    ConfigError."""
    document = YamlDocument.parse(read_text(path), str(path), at=("engines",))
    if document.data is None:
        raise ConfigError(f"{path}: is empty; write [] when there are no replicas")
    if not isinstance(document.data, list):
        raise ConfigError(
            f"{path}: must be a list like `engines`, such as "
            "`- {id: engine-0, url: http://10.0.0.1:8000}`"
        )
    engines = [
        _with_template(engine, template)
        for engine in validated(_EngineList, {"engines": document.data}, document).engines
    ]
    mistakes = _mistakes(engines, config, template, document)
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    return tuple(engines)


def _with_template(engine: EngineConfig, template: EngineConfig) -> EngineConfig:
    said = {key: getattr(engine, key) for key in engine.model_fields_set}
    return template.model_copy(update={"id": engine.id, "url": engine.url, **said})


def _mistakes(
    engines: Sequence[EngineConfig],
    config: HeadstartConfig,
    template: EngineConfig,
    document: YamlDocument,
) -> Sequence[str]:
    """What only shows when entries are compared to one another and to the configuration."""
    mistakes = []
    first: dict[str, int | None] = {}
    for index, engine in enumerate(engines):
        line = document.line_of(("engines", index, "id"))
        mistake = config.mistake_in(engine)
        if engine.block_size != template.block_size and (
            config.model_of(engine) is config.model_of(template)
        ):
            mistake = (
                f"block_size is {engine.block_size}, but fleet.discovery.engine says "
                f"{template.block_size}: it must be the same for all replicas of a model"
            )
        if engine.id in first:
            mistake = f"stands twice (first in line {first[engine.id]}); ids must differ"
        if mistake is not None:
            mistakes.append(f"{document.place(line)}: engines: {engine.id}: {mistake}")
        first.setdefault(engine.id, line)
    return mistakes

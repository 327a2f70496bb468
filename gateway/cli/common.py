"""What several commands do first: read the configuration, find the model, set up logging."""

from __future__ import annotations

import argparse
import logging
import sys
from dataclasses import dataclass
from pathlib import Path

from gateway.model.fetch import ensure_demo_model
from gateway.settings.config_file import find_config, load_config
from gateway.settings.user_error import UserError
from policies.config import HeadstartConfig, ModelConfig
from policies.engine import EngineConfig


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A configuration and the file that it came from; None: the built-in defaults."""

    config: HeadstartConfig
    path: Path | None


def load_config_of(args: argparse.Namespace) -> LoadedConfig:
    """The configuration that `--config` names, or the default one, with its file."""
    path = find_config(args.config)
    return LoadedConfig(load_config(path), path)


def config_of(args: argparse.Namespace) -> HeadstartConfig:
    """The configuration that `--config` names, or the default one."""
    return load_config_of(args).config


def model_dir_of(config: HeadstartConfig, engine: EngineConfig | None = None) -> Path:
    """The directory of an engine's model (None: of the first one), absolute. The demo model is
    fetched where it is missing."""
    return _dir_of(config.model_of(engine) if engine is not None else config.model)


def _dir_of(model: ModelConfig) -> Path:
    if model.path is not None:
        return Path(model.path).expanduser().absolute()
    check_demo_model(model)
    return ensure_demo_model()


def check_demo_model(model: ModelConfig) -> None:
    """UserError when no path is configured for a model that is not the demo model."""
    if model.path is None and model.name != ModelConfig().name:
        raise UserError(
            f"model.path is unset: give the directory of {model.name} "
            f"(only {ModelConfig().name} is fetched by itself)"
        )


def with_model(config: HeadstartConfig) -> HeadstartConfig:
    """The configuration with the path of every model filled in."""
    model, *more = (
        model.model_copy(update={"path": str(_dir_of(model))}) for model in config.models
    )
    return config.model_copy(update={"model": model, "more_models": tuple(more)})


def set_up_logging(level: str) -> None:
    """Plain lines on stderr."""
    logging.basicConfig(
        level=level.upper(),
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )


def say(text: str = "") -> None:
    """One line for the user."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()

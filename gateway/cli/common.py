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


def model_dir_of(config: HeadstartConfig) -> Path:
    """The model's directory, absolute. The demo model is fetched where it is missing."""
    if config.model.path is not None:
        return Path(config.model.path).expanduser().absolute()
    check_demo_model(config)
    return ensure_demo_model()


def check_demo_model(config: HeadstartConfig) -> None:
    """UserError when no path is configured for a model that is not the demo model."""
    if config.model.path is None and config.model.name != ModelConfig().name:
        raise UserError(
            f"model.path is unset: give the directory of {config.model.name} "
            f"(only {ModelConfig().name} is fetched by itself)"
        )


def with_model(config: HeadstartConfig) -> HeadstartConfig:
    """The configuration with model.path filled in."""
    model = config.model.model_copy(update={"path": str(model_dir_of(config))})
    return config.model_copy(update={"model": model})


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

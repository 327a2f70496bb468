"""This user's own directories for what may be fetched again and for what may not."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Downloads and converted models: safe to delete."""
    return _base("XDG_CACHE_HOME", ".cache")


def state_dir() -> Path:
    """Logs and secrets of this machine."""
    return _base("XDG_STATE_HOME", ".local/state")


def _base(variable: str, below_home: str) -> Path:
    # The specification says that relative values are to be ignored.
    configured = os.environ.get(variable, "")
    root = Path(configured) if os.path.isabs(configured) else Path.home() / below_home
    return root / "headstart"

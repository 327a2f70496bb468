"""`headstart model`: fetches the demo model and prints where it is."""

from __future__ import annotations

import argparse

from gateway.cli.common import config_of, model_dir_of, say


def run(args: argparse.Namespace) -> int:
    """Print the model's directory."""
    say(str(model_dir_of(config_of(args))))
    return 0

"""`headstart model`: fetches the demo model, and tells what an adapter is."""

from __future__ import annotations

import argparse
from pathlib import Path

from engine_adapter.adapters import adapter_digest
from gateway.cli.common import config_of, model_dir_of, say


def run(args: argparse.Namespace) -> int:
    """Print the model's directory, or the digest of an adapter."""
    if args.action == "digest":
        say(adapter_digest(Path(args.dir).expanduser()))
    else:
        say(str(model_dir_of(config_of(args))))
    return 0

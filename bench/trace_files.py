"""Where a benchmark finds the request traces."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_traces(parser: argparse.ArgumentParser) -> None:
    """The option that says where they are."""
    parser.add_argument(
        "--traces", metavar="DIR", type=Path, default=Path("../shared/traces"),
        help="request traces, NAME.jsonl.gz (%(default)s)",
    )  # fmt: skip


def check_traces(parser: argparse.ArgumentParser, directory: Path) -> None:
    """Ends the program when there are none."""
    if not any(directory.glob("*.jsonl.gz")):
        parser.error(f"no *.jsonl.gz in {directory}: say with --traces where the traces are")

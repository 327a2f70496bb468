"""`headstart stats`: the gateway's /cache/stats as a table."""

from __future__ import annotations

import argparse
import json
import time

from pydantic import ValidationError
from rich.console import Console
from rich.live import Live

from gateway.accounts.stats_schema import CacheStats
from gateway.cli.common import config_of, say
from gateway.cli.stats_table import render
from gateway.local.local_http import request
from gateway.settings.user_error import UserError

WATCH_INTERVAL_S = 2.0


def fetch(base_url: str) -> CacheStats:
    """What the gateway at `base_url` says. Raises UserError."""
    url = f"{base_url}/cache/stats"
    try:
        return CacheStats.model_validate(request(url).json())
    except ValidationError as error:
        raise UserError(
            f"{url} does not answer like this version of Headstart; what listens there?"
        ) from error


def run(args: argparse.Namespace) -> int:
    """Print once, or again and again with --watch."""
    base_url = (args.url or f"http://{config_of(args).listen}").rstrip("/")
    if args.json:
        say(json.dumps(request(f"{base_url}/cache/stats").json(), indent=2))
        return 0
    console = Console()
    if not args.watch:
        console.print(render(fetch(base_url), window_of(args.window)))
        return 0
    with Live(console=console, auto_refresh=False) as live:
        while True:
            live.update(render(fetch(base_url), window_of(args.window)), refresh=True)
            time.sleep(WATCH_INTERVAL_S)


def window_of(option: str) -> str:
    """The name in the schema of what `--window` says."""
    return option if option == "since_start" else f"last_{option}"

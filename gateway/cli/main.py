"""The command `headstart`. Each subcommand is a module with a `run(args)`."""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from collections.abc import Callable, Sequence
from typing import cast

from engine_adapter.base import EngineAdapterError
from gateway.cli.parser import USER_ERROR, build_parser
from gateway.settings.user_error import UserError
from prefix_store.base import StoreError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 2 for what the user has to mend."""
    args = build_parser().parse_args(argv)
    # Loaded late: `headstart stats` needs neither tokenizers nor an event loop.
    run = cast(Callable[[argparse.Namespace], int], importlib.import_module(args.module).run)
    try:
        return run(args)
    except (UserError, EngineAdapterError, StoreError) as error:
        sys.stderr.write(f"headstart: {error}\n")
        return USER_ERROR
    except BrokenPipeError:
        # The reader of our output is gone (`headstart stats | head`); say nothing more to it.
        sys.stderr.close()
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT

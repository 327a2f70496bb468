"""`headstart pins`: which blocks are pinned in this host's store, and the end of their pins."""

from __future__ import annotations

import argparse
import json

import msgspec
from rich.console import Console
from rich.table import Table

from gateway.cli.common import config_of, say
from gateway.settings.units import size, span
from gateway.settings.user_error import UserError
from prefix_store.client import StoreClient
from prefix_store.pins import PinOwner
from prefix_store.protocol import Pin, Pins
from prefix_store.runtime_dir import RuntimePaths

_TIMEOUT_S = 5.0
_COLUMNS = ("tier", "tenant", "session", "prefix", "blocks", "bytes", "ends in")
_NUMBERS = ("blocks", "bytes", "ends in")


def run(args: argparse.Namespace) -> int:
    """List, or with --release end, the pins of an owner."""
    wanted = owner_of(args)
    config = config_of(args)
    client = StoreClient.connect(
        RuntimePaths.of(config).store_socket(config), client="pins", timeout_s=_TIMEOUT_S
    )
    try:
        if args.release:
            _say_released(_release(client, wanted), as_json=args.json)
        else:
            pins = client.pins(tenant=wanted.tenant, session=wanted.session, prefix=wanted.prefix)
            _say_pins(pins, as_json=args.json)
    finally:
        client.close()
    return 0


def owner_of(args: argparse.Namespace) -> PinOwner:
    """Whose pins are meant; texts that are empty match any. Raises UserError."""
    filters = (args.tenant, args.session, args.prefix)
    if "" in filters:
        raise UserError("--tenant, --session and --prefix need a name; leave out what is any")
    if args.all and not args.release:
        raise UserError("--all goes with --release; without it all pins are listed anyway")
    if args.release and args.all == any(filters):
        raise UserError(
            "--release needs --tenant, --session or --prefix, or else --all for every pin"
        )
    return PinOwner(args.tenant or "", args.session or "", args.prefix or "")


def table(pins: list[Pin]) -> Table:
    """For people, one line for each owner and tier."""
    page = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in _COLUMNS:
        page.add_column(name, justify="right" if name in _NUMBERS else "left")
    for pin in pins:
        names = [pin.tenant or "-", pin.session or "-", pin.prefix or "-"]
        numbers = [f"{pin.num_blocks:,}", size(pin.num_bytes), span(max(0.0, pin.ends_in_s))]
        page.add_row(pin.tier, *names, *numbers)
    return page


def _release(client: StoreClient, owner: PinOwner) -> int:
    return client.unpin(tenant=owner.tenant, session=owner.session, prefix=owner.prefix)


def _say_pins(answer: Pins, *, as_json: bool) -> None:
    if as_json:
        say(json.dumps({"pins": msgspec.to_builtins(answer.pins), "more": answer.more}, indent=2))
    elif answer.pins:
        Console().print(table(answer.pins))
    else:
        say("nothing is pinned")
    if answer.more and not as_json:
        say(f"and {answer.more:,} more; name a tenant, session or prefix to see them")


def _say_released(num_blocks: int, *, as_json: bool) -> None:
    if as_json:
        say(json.dumps({"released_blocks": num_blocks}))
    else:
        say(f"{num_blocks:,} pinned blocks released; they stay until their room is needed")

"""`headstart replicas`: the replicas of a running gateway, by its /admin/replicas."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any
from urllib.parse import quote, urlsplit

import msgspec
import yaml
from rich.console import Console
from rich.table import Table

from gateway.cli.common import config_of, say
from gateway.fleet.replica_status import ReplicaStatus
from gateway.local.local_http import HttpAnswer, request
from gateway.settings.key_file import read_keys
from gateway.settings.units import span
from gateway.settings.user_error import UserError

_PATH = "/admin/replicas"
_COLUMNS = ("id", "url", "state", "for", "running", "waiting", "KV free")
_NUMBERS = ("for", "running", "waiting", "KV free")


def run(args: argparse.Namespace) -> int:
    """One action, and what the gateway says to it."""
    _check(args)
    config = config_of(args)
    base_url = (args.url or f"http://{config.listen}").rstrip("/") + _PATH
    key = _key(args.key_file, config.admin.key_file)
    answer = _ask(args, base_url, key)
    decoded = answer.json()
    if args.json:
        say(json.dumps(decoded, indent=2))
    elif args.action == "list":
        _say_list(_statuses(answer.url, decoded))
    else:
        say(_outcome(args.action, decoded))
    return 0


def engine_of(url: str, engine_id: str | None, settings: list[str] | None) -> dict[str, Any]:
    """The new engine, as the gateway wants it. Raises UserError for what can be seen here."""
    engine: dict[str, Any] = {"id": engine_id or urlsplit(url).netloc.rpartition("@")[2]}
    engine["url"] = url
    for setting in settings or ():
        name, equals, value = setting.partition("=")
        if not equals or not name:
            raise UserError(f"--set {setting}: must be KEY=VALUE, such as max_running=64")
        try:
            engine[name] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise UserError(f"--set {setting}: the value is not valid YAML") from None
    return engine


def table(replicas: list[ReplicaStatus], now: float) -> Table:
    """For people; `now` is a Unix time."""
    page = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in _COLUMNS:
        page.add_column(name, justify="right" if name in _NUMBERS else "left")
    for each in replicas:
        page.add_row(
            each.id,
            each.url,
            _state(each),
            span(max(0.0, now - each.since)),
            f"{each.in_flight:,}",
            f"{each.waiting:,}",
            "-" if each.kv_free is None else f"{each.kv_free:.0%}",
        )
    return page


def _state(replica: ReplicaStatus) -> str:
    slow = replica.state == "ready" and replica.share < 1.0
    return f"ready {replica.share:.0%}" if slow else replica.state


def _check(args: argparse.Namespace) -> None:
    adds, lists = args.action == "add", args.action == "list"
    if lists and args.replica is not None:
        raise UserError("list shows all replicas; leave the id out")
    if not lists and args.replica is None:
        raise UserError(f"{args.action} what? Give the {'URL' if adds else 'id'} of an engine")
    if not adds and (args.id is not None or args.set is not None):
        raise UserError("--id and --set go with add")
    if args.force and args.action != "remove":
        raise UserError("--force goes with remove")


def _key(key_file: str | None, configured: str | None) -> str | None:
    if key_file is not None:
        return read_keys(key_file, "--key-file")[0]
    return None if configured is None else read_keys(configured, "admin.key_file")[0]


def _ask(args: argparse.Namespace, base_url: str, key: str | None) -> HttpAnswer:
    if args.action == "list":
        return request(base_url, key=key)
    if args.action == "add":
        return request(base_url, engine_of(args.replica, args.id, args.set), key=key)
    url = f"{base_url}/{quote(args.replica, safe='')}"
    if args.action == "remove":
        return request(url + ("?force=1" if args.force else ""), method="DELETE", key=key)
    return request(f"{url}/{args.action}", method="POST", key=key)


def _statuses(url: str, decoded: Any) -> list[ReplicaStatus]:
    try:
        return msgspec.convert(decoded["replicas"], list[ReplicaStatus])
    except (msgspec.ValidationError, LookupError, TypeError) as error:
        raise UserError(
            f"{url} does not answer like this version of Headstart; what listens there?"
        ) from error


def _say_list(replicas: list[ReplicaStatus]) -> None:
    if not replicas:
        say("there is no replica; see `headstart replicas add`")
        return
    Console().print(table(replicas, time.time()))
    for each in replicas:
        if each.state != "ready":
            say(f"{each.id} is {each.state}: {each.reason}")


def _outcome(action: str, status: dict[str, Any]) -> str:
    """One sentence."""
    name = status.get("id")
    if action == "add":
        return f"{name} is added; it gets requests when it answers"
    if action == "undrain":
        return f"{name} is {status.get('state')}: {status.get('reason')}"
    if status.get("removed"):
        return f"{name} is removed"
    running = f"{status.get('in_flight', 0):,} running"
    return f"{name} gets no new requests ({running})" + (
        "; it is removed when they have ended" if action == "remove" else ""
    )

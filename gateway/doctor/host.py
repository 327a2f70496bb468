"""The doctor's checks of this host: runtime directory, tenants and salts, store, gateway."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from gateway.doctor.finding import Finding, fail, ok, warn
from gateway.doctor.tiers import check_policies, check_tiers
from gateway.local.local_http import HttpError, request
from gateway.request.tenants import Tenants
from gateway.settings.user_error import UserError
from policies.config import HeadstartConfig
from policies.engine import EngineConfig
from prefix_store.base import StoreError
from prefix_store.client import StoreClient
from prefix_store.protocol import StoreStats
from prefix_store.runtime_dir import RuntimePaths

HALVES = ("scheduler", "worker")
"""Of a connector, by the names under which they connect: engine-0/scheduler."""

LONGEST_SOCKET_PATH = 107
"""Bytes that Linux takes for the path of a Unix socket."""


def check_runtime_dir(root: Path) -> Finding:
    """Sockets there carry tokens and salts: the directory must be ours alone."""
    name = "runtime directory"
    try:
        status = root.stat()
    except FileNotFoundError:
        return warn(name, f"{root} does not exist yet; `headstart store` or `serve` makes it")
    except OSError as error:
        return fail(name, f"{root}: {error.strerror}; set runtime_dir to a directory of yours")
    if status.st_uid != os.getuid():
        return fail(
            name, f"{root} belongs to user {status.st_uid}; set runtime_dir to a directory of yours"
        )
    if stat.S_IMODE(status.st_mode) & 0o077:
        return fail(name, f"{root} is open to other users; run `chmod 700 {root}`")
    if len(os.fsencode(root)) + len("/engine-0-events.sock") > LONGEST_SOCKET_PATH:
        return fail(name, f"{root} is too long for sockets; set runtime_dir to a shorter path")
    return ok(name, str(root))


def check_tenants(config: HeadstartConfig) -> Finding:
    """Key files and the secret of the salts can be read."""
    try:
        Tenants.load(config)
    except UserError as error:
        return fail("tenants", str(error))
    if not config.tenants:
        return ok("tenants", "none: everybody is the tenant `default`, no API key is asked for")
    if config.salt_secret_file is None:
        return warn(
            "tenants",
            "salts come from a secret of this machine; give all gateways of a fleet the same "
            "salt_secret_file",
        )
    return ok("tenants", f"{len(config.tenants)} with keys and salts of their own")


def check_store(
    config: HeadstartConfig, paths: RuntimePaths, engines: Sequence[EngineConfig]
) -> Iterator[Finding]:
    """The store answers, and the connectors of these engines are connected to it."""
    if config.store is None:
        yield ok("store", "none configured: only the engines' own caches are reused")
        return
    try:
        client = StoreClient.connect(paths.store_socket(config), client="doctor", timeout_s=5.0)
        try:
            stats = client.stats()
        finally:
            client.close()
    except StoreError as error:
        yield fail("store", str(error))
        return
    used, size = stats.used_bytes / 2**30, stats.capacity_bytes / 2**30
    yield ok("store", f"{stats.store}: {used:.2f} of {size:.2f} GiB used, {stats.blocks} blocks")
    yield from check_tiers(config.store, stats.tiers)
    yield from check_policies(stats.policies)
    for engine in engines:
        yield _connected(engine.id, stats)


def _connected(engine_id: str, stats: StoreStats) -> Finding:
    """Both halves of the engine's connector have a connection of their own."""
    name = f"{engine_id} connector"
    missing = [half for half in HALVES if f"{engine_id}/{half}" not in stats.connectors]
    if not missing:
        return ok(name, f"connected to {stats.store}")
    return fail(
        name,
        f"its {' and '.join(missing)} half is not connected to {stats.store}; start the engine on "
        f"this host with `headstart engine --id {engine_id}` and this configuration (its log says "
        "why the connector did not connect)",
    )


def check_gateway(config: HeadstartConfig, engines: Sequence[EngineConfig]) -> Finding:
    """A running gateway is ready and follows the events of all its engines; `engines` says which
    of them have none."""
    silent = {engine.id for engine in engines if not engine.report_events}
    url = f"http://{config.listen}"
    try:
        if request(f"{url}/readyz").status != 200:
            return fail("gateway", f"{url} runs, but no engine answers it")
        stats = request(f"{url}/cache/stats").json()
        lost = [
            engine
            for engine, replica in stats["replicas"].items()
            if engine not in silent and not (replica["state"].get("events") or {}).get("connected")
        ]
    except (HttpError, LookupError, TypeError, AttributeError) as error:
        if isinstance(error, HttpError) and str(error).startswith("no answer"):
            return warn("gateway", f"does not run at {url}; start it with `headstart serve`")
        return fail("gateway", f"{url} does not answer like this version of Headstart ({error})")
    if lost:
        return fail(
            "gateway",
            f"{url} gets no KV events from {', '.join(lost)}: gateway and engine must use the "
            "same runtime_dir, or the same `events` and `events_replay` endpoints",
        )
    mismatches = stats["total"]["windows"]["since_start"]["rendering_mismatches"]
    if mismatches:
        return warn("gateway", f"{mismatches} prompts were rendered differently than by the engine")
    count = len(stats["replicas"].keys() - silent)
    return ok("gateway", f"ready at {url}, follows the events of {count} engines")

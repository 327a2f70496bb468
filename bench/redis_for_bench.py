"""The tests' real Redis server and slow proxy, for benchmarks."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from redis_server import RedisServer, installed_servers
from slow_proxy import SlowProxy

__all__ = ["RedisServer", "SlowProxy", "start_redis"]


def start_redis() -> RedisServer:
    """Redis or Valkey, whichever is installed, empty and without persistence."""
    servers = installed_servers()
    if not servers:
        raise SystemExit("bench: no redis-server; install the development dependencies")
    return RedisServer(next(iter(servers.values())))

"""The clients of redis-py: how they are opened from a URL and closed, and what they raise."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisClusterException, RedisError

from prefix_store.base import StoreError

MAX_CONNECTIONS = 32
"""To each node of a cluster."""

FAULTS = (RedisError, RedisClusterException, OSError)
"""RedisClusterException (no node of a cluster can be reached) is no RedisError in redis-py."""


def open_client(url: str, connect_s: float) -> Redis | RedisCluster:
    """Nothing goes over the network yet. Raises StoreError for an impossible URL."""
    options: dict[str, Any] = {
        "protocol": 2,
        "socket_timeout": None,
        "socket_connect_timeout": connect_s,
        "retry": Retry(NoBackoff(), 0),
        "driver_info": None,
    }
    scheme, _, rest = url.partition("://")
    try:
        if scheme.endswith("+cluster"):
            return RedisCluster.from_url(
                f"{scheme.removesuffix('+cluster')}://{rest}",
                max_connections=MAX_CONNECTIONS,
                require_full_coverage=False,
                **options,
            )
        client = Redis.from_url(url, **options)
        # Finds unknown options in the URL.
        client.connection_pool.make_connection()  # type: ignore[no-untyped-call]
        return client
    except (ValueError, TypeError, RedisError) as error:
        # Its text may quote a part of the password, so it is not passed on.
        raise StoreError(
            f"store.redis.url is not usable ({type(error).__name__}); special characters in "
            "user and password are written as in %2F"
        ) from None


async def close_client(client: Redis | RedisCluster) -> None:
    """Whatever becomes of it, within a second."""
    with contextlib.suppress(*FAULTS, TimeoutError):
        async with asyncio.timeout(1.0):
            await client.aclose()


def words_of(error: BaseException) -> str:
    """What Redis or the system said; redis-py takes the first word off some errors."""
    words = str(error) or type(error).__name__
    for kind, word in (
        ("AuthenticationError", "WRONGPASS"),
        ("NoPermissionError", "NOPERM"),
        ("ReadOnlyError", "READONLY"),
        ("MovedError", "MOVED"),
        ("BusyLoadingError", "LOADING"),
        ("ClusterDownError", "CLUSTERDOWN"),
    ):
        if type(error).__name__ == kind and not words.startswith(("NOAUTH", word)):
            return f"{word} {words}"
    return words

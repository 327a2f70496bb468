"""Which headers pass the gateway, in both directions, and which it sets."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from multidict import CIMultiDict

REQUEST_ID = "X-Request-Id"
REPLICA = "x-headstart-replica"
CACHED_TOKENS = "x-headstart-cached-tokens"
"""What the engine reused, as it reports; only in whole answers, whose head is sent last."""
PREDICTED_TOKENS = "x-headstart-predicted-tokens"
"""What should be reused on the path chosen, from the index, before the engine has begun."""
ROUTE = "x-headstart-route"
"""The decision that chose the replica, as JSON, for who sent EXPLAIN."""

# Of requests:
EXPLAIN = "x-headstart-explain"
"""Any value but 0: say in ROUTE how the replica was chosen."""
DEADLINE_MS = "x-headstart-deadline-ms"
"""An engine must have begun within so many milliseconds, else the request is refused."""

MAX_REQUEST_ID = 128

# RFC 9110, section 7.6.1, and the older Keep-Alive and Proxy-Connection.
_HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
# What concerns the client and us only: keys, and how the body came (it goes on in plain JSON).
_NOT_TO_ENGINE = _HOP_BY_HOP | {
    "accept-encoding",
    "authorization",
    "content-encoding",
    "content-length",
    "content-type",
    "cookie",
    "expect",
    "host",
    "x-api-key",
    "x-request-id",
    EXPLAIN,
    DEADLINE_MS,
}
_NOT_TO_CLIENT = _HOP_BY_HOP | {"content-length", "date", "server", "x-request-id"}


def request_id_of(headers: Mapping[str, str]) -> str:
    """The client's id where it is printable ASCII and short enough, else one of ours."""
    given = headers.get(REQUEST_ID, "").strip()
    if given and len(given) <= MAX_REQUEST_ID and given.isascii() and given.isprintable():
        return given
    return f"req-{secrets.token_hex(16)}"


def for_engine(headers: Mapping[str, str], request_id: str) -> CIMultiDict[str]:
    """The client's headers as they go to the engine."""
    passed = _without(headers, _NOT_TO_ENGINE)
    passed[REQUEST_ID] = request_id
    passed["Content-Type"] = "application/json"
    return passed


def for_client(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """The engine's headers as they go to the client."""
    return _without(headers, _NOT_TO_CLIENT)


def _without(headers: Mapping[str, str], names: frozenset[str]) -> CIMultiDict[str]:
    """A copy without `names` and without what the header Connection lists."""
    listed = headers.get("Connection", "")
    dropped = names | {name.strip().lower() for name in listed.split(",")} if listed else names
    return CIMultiDict(
        (name, value) for name, value in headers.items() if name.lower() not in dropped
    )

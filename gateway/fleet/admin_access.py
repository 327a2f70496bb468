"""Who may change the fleet."""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Iterable

from gateway.settings.key_file import read_keys
from gateway.web.errors import ForbiddenError, UnauthorizedError
from gateway.web.exchange import Exchange
from policies.fleet import AdminConfig

_SET_A_KEY = "set admin.key_file in the configuration and send a key"

# What a browser adds by itself. Any page that somebody opens on this machine could send requests to
# us, so a connection from this machine is no proof when it comes out of a browser.
_OF_BROWSERS = ("Origin", "Sec-Fetch-Site")

# What a proxy adds: then the connection is from this machine and the request from anywhere.
_OF_PROXIES = ("Forwarded", "X-Forwarded-For", "X-Real-Ip", "Via")


class AdminAccess:
    """By key where keys are configured, else by the address from which the connection comes.

    Keys are looked up by their SHA-256, so the time taken tells nothing.
    """

    def __init__(self, keys: Iterable[str] | None) -> None:
        """None: no keys are configured."""
        self._key_hashes = None if keys is None else frozenset(_key_hash(key) for key in keys)

    @classmethod
    def load(cls, config: AdminConfig) -> AdminAccess:
        """Raises UserError when the key file cannot be used."""
        file = config.key_file
        return cls(None if file is None else read_keys(file, "admin.key_file"))

    def check(self, exchange: Exchange) -> None:
        """Raises UnauthorizedError, ForbiddenError."""
        if self._key_hashes is None:
            _check_is_from_here(exchange)
            return
        scheme, _, key = exchange.request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise UnauthorizedError("no admin key; send `Authorization: Bearer <key>`")
        if _key_hash(key.strip()) not in self._key_hashes:
            raise UnauthorizedError("this is no admin key (admin.key_file)")


def _check_is_from_here(exchange: Exchange) -> None:
    transport, headers = exchange.request.transport, exchange.request.headers
    peer = transport.get_extra_info("peername") if transport else None
    if not isinstance(peer, tuple) or not _is_loopback(str(peer[0])):
        raise ForbiddenError(f"only for this machine; for others {_SET_A_KEY}")
    if any(name in headers for name in _OF_BROWSERS):
        raise ForbiddenError(f"not for browsers; {_SET_A_KEY}")
    if any(name in headers for name in _OF_PROXIES):
        raise ForbiddenError(f"not through a proxy; {_SET_A_KEY}")


def _is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped.is_loopback
    return address.is_loopback


def _key_hash(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()

"""Who is asking, and the salt that keeps tenants' caches apart.

A salt is HMAC-SHA256 of the tenant's name under a secret, so nobody can guess another's, and no
client chooses one.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gateway.fleet.ticket import Ticket
from gateway.settings.key_file import read_keys
from gateway.settings.user_dirs import state_dir
from gateway.settings.user_error import UserError
from gateway.web.errors import UnauthorizedError
from policies.config import HeadstartConfig

DEFAULT_TENANT = "default"
MIN_SECRET_BYTES = 16


@dataclass(frozen=True, slots=True)
class Tenant:
    """Clients that share one cache."""

    name: str
    salt: str
    """43 characters of base64url: within vLLM's rules for `cache_salt`."""
    weight: float = 1.0
    """Its share of the engines while requests wait."""

    def ticket(self, priority: int, deadline: float | None, *, cost: float) -> Ticket:
        """For a request of one of its clients."""
        return Ticket(
            self.name, weight=self.weight, priority=priority, cost=cost, deadline=deadline
        )


def derive_salt(secret: bytes, tenant: str) -> str:
    """The salt of a tenant; equal on all gateways that have the secret."""
    mac = hmac.new(secret, b"headstart-salt" + tenant.encode(), hashlib.sha256).digest()
    return base64.urlsafe_b64encode(mac).rstrip(b"=").decode()


class Tenants:
    """API key -> tenant. Keys are looked up by their SHA-256, so the time taken tells nothing."""

    def __init__(
        self, secret: bytes, keys: Mapping[str, str], weights: Mapping[str, float] | None = None
    ) -> None:
        """`keys` maps API keys to names of tenants; empty: everybody is the tenant `default`.
        `weights`: by name, 1 where a name is missing."""
        shares = weights or {}
        by_name = {
            name: Tenant(name, derive_salt(secret, name), shares.get(name, 1.0))
            for name in keys.values()
        }
        self._by_key_hash = {_key_hash(key): by_name[name] for key, name in keys.items()}
        self._default = (
            None if keys else Tenant(DEFAULT_TENANT, derive_salt(secret, DEFAULT_TENANT))
        )

    @classmethod
    def load(cls, config: HeadstartConfig) -> Tenants:
        """From the key files and the secret that the configuration names; raises UserError."""
        keys: dict[str, str] = {}
        for name, tenant in config.tenants.items():
            for key in read_keys(tenant.key_file, f"tenants.{name}.key_file"):
                if keys.setdefault(key, name) != name:
                    raise UserError(f"tenants {keys[key]} and {name} have an API key in common")
        weights = {name: tenant.weight for name, tenant in config.tenants.items()}
        return cls(_load_secret(config), keys, weights)

    def find(self, authorization: str | None) -> Tenant:
        """The tenant of an `authorization` header; raises UnauthorizedError."""
        if self._default is not None:
            return self._default
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise UnauthorizedError("no API key; send the header `Authorization: Bearer <key>`")
        tenant = self._by_key_hash.get(_key_hash(key.strip()))
        if tenant is None:
            raise UnauthorizedError("the API key is not known here")
        return tenant


def _key_hash(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _load_secret(config: HeadstartConfig) -> bytes:
    if config.salt_secret_file is None:
        return _own_secret(state_dir() / "salt-secret")
    path = Path(config.salt_secret_file).expanduser()
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        raise UserError(f"salt_secret_file: {path} cannot be read: {error}") from error
    return _long_enough(secret, path)


def _own_secret(path: Path) -> bytes:
    """Read the secret, or make it once, readable for its owner only."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not path.exists():
            _publish_secret(path)
        return _long_enough(path.read_bytes().strip(), path)
    except OSError as error:
        raise UserError(f"the salt secret {path} cannot be made: {error}") from error


def _publish_secret(path: Path) -> None:
    """Complete or not at all, and never over one that another gateway has just made."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32) + "\n")
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(draft, path)
        except FileExistsError:
            return
    finally:
        draft.unlink()


def _long_enough(secret: bytes, path: Path) -> bytes:
    if len(secret) < MIN_SECRET_BYTES:
        raise UserError(f"the salt secret {path} is too short: at least 16 bytes are needed")
    return secret

"""Keys, tenants and their salts."""

from __future__ import annotations

import re
import stat

import pytest

from gateway.request.tenants import Tenants, derive_salt
from gateway.settings.user_error import UserError
from gateway.web.errors import UnauthorizedError
from policies.config import HeadstartConfig, TenantConfig

SECRET = b"0123456789abcdef"


@pytest.fixture
def state(tmp_path, monkeypatch):
    """A state directory of this test's own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "headstart"


def config_of(tmp_path, **keys: str) -> HeadstartConfig:
    tenants = {}
    for name, text in keys.items():
        file = tmp_path / f"{name}.keys"
        file.write_text(text)
        tenants[name] = TenantConfig(key_file=str(file))
    return HeadstartConfig(tenants=tenants)


def test_salts_differ_by_tenant_and_by_secret():
    """And obey vLLM's rules: at most 128 characters, none of @ / \\ NUL."""
    salts = {
        derive_salt(secret, tenant)
        for secret in (SECRET, b"another secret here")
        for tenant in ("a", "b")
    }
    assert len(salts) == 4
    assert all(re.fullmatch(r"[A-Za-z0-9_-]{43}", salt) for salt in salts)


def test_salts_stay_the_same():
    """Stored blocks are found again after a restart, and by another gateway."""
    assert derive_salt(SECRET, "a") == derive_salt(SECRET, "a")


def test_everybody_is_default_without_tenants(state, tmp_path):
    """No key is asked for."""
    tenants = Tenants.load(config_of(tmp_path))
    assert tenants.find(None).name == "default"
    assert tenants.find("Bearer anything").name == "default"


def test_keys_lead_to_tenants(state, tmp_path):
    """Several keys a tenant; comments and empty lines are none."""
    tenants = Tenants.load(config_of(tmp_path, a="k1\n# note\n\n k2 \n", b="k3\n"))
    assert [tenants.find(f"Bearer {key}").name for key in ("k1", "k2", "k3")] == ["a", "a", "b"]
    assert tenants.find("bearer k1").salt == tenants.find("Bearer k2").salt
    assert tenants.find("Bearer k1").salt != tenants.find("Bearer k3").salt


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Basic k1", "k1", "Bearer # note"]
)
def test_others_are_refused(state, tmp_path, header):
    """Also a comment of the key file is no key."""
    tenants = Tenants.load(config_of(tmp_path, a="k1\n# note\n"))
    with pytest.raises(UnauthorizedError):
        tenants.find(header)


def test_a_key_belongs_to_one_tenant(state, tmp_path):
    """Otherwise the order of the file would decide."""
    with pytest.raises(UserError, match="in common"):
        Tenants.load(config_of(tmp_path, a="k1", b="k1"))


@pytest.mark.parametrize("text", ["", "# only a comment\n"])
def test_a_key_file_without_keys_is_a_mistake(state, tmp_path, text):
    """The path is named."""
    with pytest.raises(UserError, match=r"tenants\.a\.key_file"):
        Tenants.load(config_of(tmp_path, a=text))


def test_a_missing_key_file_is_a_mistake(state):
    """One sentence, no traceback."""
    config = HeadstartConfig(tenants={"a": TenantConfig(key_file="/nonexistent/keys")})
    with pytest.raises(UserError, match="cannot be read"):
        Tenants.load(config)


def test_the_secret_is_made_once_for_its_owner_only(state, tmp_path):
    """A second start finds it."""
    salt = Tenants.load(config_of(tmp_path)).find(None).salt
    file = state / "salt-secret"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert list(state.iterdir()) == [file]
    assert Tenants.load(config_of(tmp_path)).find(None).salt == salt


def test_a_configured_secret_is_used(state, tmp_path):
    """The same on all gateways of a fleet; nothing is made in the state directory."""
    file = tmp_path / "secret"
    file.write_bytes(SECRET + b"\n")
    config = HeadstartConfig(salt_secret_file=str(file))
    assert Tenants.load(config).find(None).salt == derive_salt(SECRET, "default")
    assert not state.exists()


def test_short_secrets_are_refused(state, tmp_path):
    """They could be guessed."""
    file = tmp_path / "secret"
    file.write_bytes(b"short")
    with pytest.raises(UserError, match="too short"):
        Tenants.load(HeadstartConfig(salt_secret_file=str(file)))

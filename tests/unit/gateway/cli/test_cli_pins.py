"""`headstart pins`: mistakes are one sentence; what is listed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from gateway.cli.main import USER_ERROR, build_parser, main
from gateway.cli.pins import owner_of, table
from gateway.settings.user_error import UserError
from prefix_store.pins import PinOwner
from prefix_store.protocol import Pin

PIN = Pin("memory", "acme", "s-1", "", 1234, 3 * 2**30, 5400.0)


def test_a_store_that_is_away_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It names the socket and the command that starts one."""
    file = tmp_path / "f.yaml"
    file.write_text(json.dumps({"runtime_dir": str(tmp_path)}))
    assert main(["pins", "--config", str(file)]) == USER_ERROR
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"headstart: no store at {tmp_path}/store.sock (No such file")
    assert said.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--release"], "--release needs --tenant, --session or --prefix, or else --all"),
        (["--release", "--all", "--tenant", "a"], "--release needs"),
        (["--all"], "--all goes with --release"),
        (["--release", "--tenant", ""], "need a name"),
        (["--session", ""], "need a name"),
    ],
)
def test_releasing_needs_to_be_said_in_full(arguments: list[str], sentence: str) -> None:
    """An empty shell variable must not release everything."""
    with pytest.raises(UserError, match=sentence):
        owner_of(build_parser().parse_args(["pins", *arguments]))


def test_filters_must_all_match() -> None:
    """Those that are left out match any."""
    args = build_parser().parse_args(["pins", "--tenant", "acme", "--prefix", "doc"])
    assert owner_of(args) == PinOwner("acme", "", "doc")
    owner = PinOwner("acme", "s-1", "")
    assert PinOwner("acme", "", "").matches(owner)
    assert PinOwner("", "s-1", "").matches(owner)
    assert PinOwner("", "", "").matches(owner)
    assert not PinOwner("acme", "", "doc").matches(owner)


def test_the_table_fits_80_columns() -> None:
    """Numbers in units that people read."""
    console = Console(width=80)
    with console.capture() as captured:
        console.print(table([PIN]))
    head, row, *_ = captured.get().splitlines()
    assert head.split() == ["tier", "tenant", "session", "prefix", "blocks", "bytes", "ends", "in"]
    assert row.split() == ["memory", "acme", "s-1", "-", "1,234", "3", "GiB", "90", "m"]

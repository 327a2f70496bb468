"""The command line: help that teaches, mistakes that are one sentence, exit codes."""

from __future__ import annotations

import argparse
import socket
from pathlib import Path

import pytest

from engine_adapter.vllm_build import Platform, VllmBuild
from gateway.cli import engine as cli_engine
from gateway.cli.common import with_model
from gateway.cli.engine import choose_engine
from gateway.cli.main import USER_ERROR, build_parser, main
from gateway.cli.serve import listening_at, parts_of
from gateway.cli.stats import window_of
from gateway.settings.config_file import parse_config
from gateway.settings.user_error import UserError
from policies.config import HeadstartConfig
from policies.engine import AdapterConfig

COMMANDS = (
    "serve",
    "store",
    "engine",
    "demo",
    "stats",
    "pins",
    "replicas",
    "simulate",
    "doctor",
    "model",
)


def config(text: str) -> HeadstartConfig:
    return parse_config(text, source="f")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_has_an_example(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A reader learns the command from its help."""
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert f"headstart {command}" in text.partition("example")[2]
    assert "--config FILE" in text


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_takes_a_configuration(command: str) -> None:
    """One file configures everything."""
    needed = ["--trace", "t"] if command == "simulate" else []
    args = build_parser().parse_args([command, "--config", "x.yaml", *needed])
    assert isinstance(args, argparse.Namespace)
    assert args.config == "x.yaml"


@pytest.mark.parametrize("argv", [[], ["nonsense"], ["stats", "--window", "2m"], ["serve", "--x"]])
def test_wrong_arguments_are_one_sentence(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """No usage dump, no traceback, exit code 2."""
    with pytest.raises(SystemExit) as end:
        main(argv)
    assert end.value.code == USER_ERROR
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("headstart: ")
    assert err.count("\n") == 1
    assert "--help" in err


@pytest.mark.parametrize(
    "command", ["serve", "store", "engine", "stats", "doctor", "demo", "model"]
)
def test_typo_in_the_configuration_ends_every_command(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sentence names file, line and key; exit code 2."""
    file = tmp_path / "headstart.yaml"
    file.write_text("stoer: {}\n")
    assert main([command, "--config", str(file)]) == USER_ERROR
    err = capsys.readouterr().err
    assert err == f'headstart: {file} line 1: stoer: unknown key; did you mean "store"?\n'


def test_stats_without_a_gateway_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody listens: said with the address."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        assert main(["stats", "--url", url]) == USER_ERROR
    assert capsys.readouterr().err == (
        f"headstart: no answer from {url}/cache/stats: Connection refused\n"
    )


def test_engine_print_shows_the_command_and_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model need not be there."""
    monkeypatch.setattr(cli_engine, "installed_build", lambda: VllmBuild(Platform.CPU, "0.32.0"))
    file = tmp_path / "c.yaml"
    file.write_text("model: {path: /nowhere, name: m}\nengines: [{id: a}, {id: b}]\n")
    argv = ["engine", "--config", str(file), "--print", "--id", "b", "--", "--max-num-seqs", "8"]
    assert main(argv) == 0
    line = capsys.readouterr().out
    assert "--model /nowhere --served-model-name m" in line
    assert '"headstart.engine_id": "b"' in line
    assert line.endswith("--max-num-seqs 8\n")


def test_engine_prints_the_command_for_its_own_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fleet may serve several."""
    monkeypatch.setattr(cli_engine, "installed_build", lambda: VllmBuild(Platform.CPU, "0.32.0"))
    file = tmp_path / "c.yaml"
    file.write_text(
        "model: {path: /one, name: one}\nmore_models: [{path: /two, name: two}]\n"
        "engines: [{id: a}, {id: b, model: two}]\n"
    )
    for engine_id, name in (("a", "one"), ("b", "two")):
        assert main(["engine", "--config", str(file), "--print", "--id", engine_id]) == 0
        line = capsys.readouterr().out
        assert f"--model /{name} --served-model-name {name}" in line


def test_every_model_but_the_demo_model_needs_a_path() -> None:
    """Paths are filled in for all models."""
    two = "model: {path: one, name: one}\nmore_models: [{name: two%s}]\n"
    filled = with_model(config(two % ", path: /two"))
    assert [model.path for model in filled.models] == [str(Path.cwd() / "one"), "/two"]
    with pytest.raises(UserError, match="give the directory of two"):
        with_model(config(two % ""))


def test_model_digest_tells_what_an_adapter_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the configuration takes it; a directory without an adapter is one sentence."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    assert main(["model", "digest", str(adapter)]) == USER_ERROR
    assert "no adapter here" in capsys.readouterr().err
    (adapter / "adapter_model.safetensors").write_bytes(b"w")
    (adapter / "adapter_config.json").write_text('{"r": 8}')
    assert main(["model", "digest", str(adapter)]) == 0
    digest = capsys.readouterr().out.strip()
    assert AdapterConfig(name="sql", digest=digest).digest == digest


def test_unknown_engine_id_lists_the_known_ones() -> None:
    """The user sees what could have been meant."""
    two = config("engines: [{id: a}, {id: b}]")
    assert choose_engine(two, None).id == "a"
    assert choose_engine(two, "b").id == "b"
    with pytest.raises(UserError, match=r"no engine has the id 'c'; .* lists: a, b"):
        choose_engine(two, "c")


BY_DNS = """
fleet:
  discovery:
    kind: dns
    name: vllm
    port: 9000
    engine: {events: "tcp://{ip}:5557", events_replay: "tcp://{ip}:5558", block_size: 64}
"""


def test_an_engine_that_is_discovered_is_started_as_it_is_looked_for() -> None:
    """One file serves the gateway and the hosts of its engines."""
    engine = choose_engine(config(BY_DNS), "engine-7")
    assert (engine.id, engine.url, engine.block_size) == ("engine-7", "http://0.0.0.0:9000", 64)
    assert (engine.events, engine.events_replay) == ("tcp://*:5557", "tcp://*:5558")
    assert choose_engine(config(BY_DNS), None).id == "engine-0"


def test_an_engine_may_be_chosen_from_the_file_of_the_fleet(tmp_path: Path) -> None:
    """As from `engines`."""
    listed = tmp_path / "replicas.yaml"
    listed.write_text("[{id: a}, {id: b, max_running: 3}]")
    found = config(f"fleet: {{discovery: {{kind: file, path: {listed}}}}}")
    assert choose_engine(found, None).id == "a"
    assert choose_engine(found, "b").max_running == 3
    with pytest.raises(UserError, match=r"no engine has the id 'c'; .*replicas\.yaml lists: a, b"):
        choose_engine(found, "c")
    listed.write_text("[]")
    with pytest.raises(UserError, match="lists: none"):
        choose_engine(found, None)


def test_other_model_needs_a_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only the demo model is fetched by itself."""
    file = tmp_path / "c.yaml"
    file.write_text("model: {name: big}\n")
    assert main(["model", "--config", str(file)]) == USER_ERROR
    assert "model.path is unset: give the directory of big" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "with_store", "with_engine", "store", "engines"),
    [
        ("{}", False, False, True, True),
        ("store: null", False, False, False, True),
        ("engines: [{id: a}]", False, False, False, False),
        ("engines: [{id: a}]", True, False, True, False),
        ("engines: [{id: a}]", False, True, False, True),
        (BY_DNS, False, False, False, False),
        (BY_DNS, True, False, True, False),
    ],
)
def test_serve_starts_what_is_not_configured_elsewhere(
    text: str, with_store: bool, with_engine: bool, store: bool, engines: bool
) -> None:
    """Without engines in the file everything is started; else only what is asked for."""
    parts = parts_of(config(text), with_store=with_store, with_engine=with_engine)
    assert (parts.store, parts.engines) == (store, engines)


def test_engines_that_are_discovered_cannot_be_started() -> None:
    """Which ones would that be?"""
    with pytest.raises(UserError, match="--with-engine: the replicas are discovered"):
        parts_of(config(BY_DNS), with_store=False, with_engine=True)


def test_with_store_contradicts_a_configuration_without_store() -> None:
    """Said instead of ignored."""
    with pytest.raises(UserError, match="--with-store: store is null"):
        parts_of(config("store: null"), with_store=True, with_engine=False)


def test_listen_option_replaces_the_configured_address() -> None:
    """Port 0 takes any free port."""
    assert listening_at(HeadstartConfig(), "127.0.0.1:0").listen == "127.0.0.1:0"
    with pytest.raises(UserError, match="--listen: 'x' is not HOST:PORT"):
        listening_at(HeadstartConfig(), "x")


def test_used_port_is_reported_before_anything_is_started() -> None:
    """Half a minute of starting an engine would be in vain."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} on 127.0.0.1 is in use"):
            listening_at(HeadstartConfig(), f"127.0.0.1:{port}")


def test_windows_have_the_names_of_the_schema() -> None:
    """`--window 1m` is last_1m."""
    assert [window_of(name) for name in ("since_start", "1m", "1h")] == [
        "since_start",
        "last_1m",
        "last_1h",
    ]

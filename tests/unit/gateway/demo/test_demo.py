"""What the demo counts as success, and how it keeps out of others' way. (That it really works is
shown on the real engine in tests/e2e.)"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from gateway.demo.conversation import FIRST_CUSTOMER, SECOND_CUSTOMER, Conversations, system_prompt
from gateway.demo.demo import demo_config, free_port, runtime_dir
from gateway.demo.request import Answer, Measured
from gateway.demo.table import DemoResult, table
from policies.config import HeadstartConfig, TenantConfig

SYSTEM_TOKENS = 1472


def measured(label: str, device: int, memory: int, cached: int | None = None) -> Measured:
    answer = Answer("text", 0.1, 1500, device + memory if cached is None else cached)
    return Measured(label, answer, device, memory, saved_s=0.6)


def result(*requests: Measured) -> DemoResult:
    return DemoResult(requests, SYSTEM_TOKENS)


def test_full_reuse_misses_nothing() -> None:
    """Cold, then the engine's cache, then the store."""
    good = result(measured("a", 0, 0), measured("b", 1472, 0), measured("c", 0, 1504))
    assert good.missing() == []


@pytest.mark.parametrize(
    ("requests", "sentence"),
    [
        (
            (measured("a", 0, 0), measured("b", 1440, 0), measured("c", 0, 1472)),
            "b: 1440 tokens came from the engine's own cache, at least 1472 should have",
        ),
        (
            (measured("a", 0, 0), measured("b", 1472, 0), measured("c", 0, 1440)),
            "c: 1440 tokens came from the store, at least 1472 should have",
        ),
        (
            (measured("a", 0, 0), measured("b", 1472, 0), measured("c", 1472, 0)),
            "c: 0 tokens came from the store, at least 1472 should have",
        ),
        (
            (measured("a", 0, 0), measured("b", 1472, 0, cached=1504), measured("c", 0, 1472)),
            "b: the engine reports 1504 reused tokens, the gateway counts 1472",
        ),
    ],
)
def test_missing_reuse_is_said(requests: tuple[Measured, ...], sentence: str) -> None:
    """One block less is a failure, and so are numbers that disagree."""
    assert result(*requests).missing() == [sentence]


def test_table_fits_a_terminal() -> None:
    """80 columns, one row a request."""
    console = Console(width=80)
    with console.capture() as captured:
        console.print(table(result(measured("customer 2, new engine", 0, 1504))))
    text = captured.get()
    assert "customer 2, new engine" in text
    assert "1504" in text
    assert "600 ms" in text


def test_each_turn_contains_the_one_before() -> None:
    """Otherwise there would be nothing to reuse; customers do not see each other's."""
    talk = Conversations()
    first = talk.messages(FIRST_CUSTOMER[0])
    talk.answered(FIRST_CUSTOMER[0], "an answer")
    second = talk.messages(FIRST_CUSTOMER[1])
    assert second[: len(first)] == first
    assert second[len(first)] == {"role": "assistant", "content": "an answer"}
    other = talk.messages(SECOND_CUSTOMER)
    assert [message["role"] for message in other] == ["system", "user"]
    assert other[0] == first[0] == {"role": "system", "content": system_prompt()}


def test_usual_port_is_taken_only_when_free() -> None:
    """A demo beside a running gateway uses another port."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert free_port(port) != port
    assert free_port(port) == port


def test_demo_has_sockets_of_its_own(tmp_path: Path) -> None:
    """Whatever the configuration says of endpoints and tenants."""
    configured = HeadstartConfig.model_validate(
        {
            "engines": [{"events": "tcp://*:1"}, {"id": "b"}],
            "store": None,
            "tenants": {"a": TenantConfig(key_file="k")},
        }
    )
    config = demo_config(configured, tmp_path)
    assert [engine.events for engine in config.engines] == [None]
    assert config.store is not None
    assert config.tenants == {}
    assert config.runtime_dir == str(tmp_path)


def test_runtime_directory_goes_and_takes_those_of_killed_demos(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A demo that was killed with SIGKILL could not remove its own."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    (tmp_path / f"headstart-demo-{ended.pid}").mkdir()
    (tmp_path / f"headstart-demo-{os.getppid()}").mkdir()
    with runtime_dir() as directory:
        assert directory.stat().st_mode & 0o777 == 0o700
        (directory / "store.sock").touch()
    assert [path.name for path in tmp_path.iterdir()] == [f"headstart-demo-{os.getppid()}"]

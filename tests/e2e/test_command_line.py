"""`headstart doctor` and `headstart stats` against the running system."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.engine


def headstart(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gateway.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_doctor_finds_a_healthy_system_healthy(stack: Any) -> None:
    """Every handshake, none missing."""
    done = headstart("doctor", "--config", str(stack.config_file))
    assert done.stderr == ""
    assert "all is well" in done.stdout, done.stdout
    assert done.returncode == 0
    for check in (
        "engine-0 reachable",
        "engine-0 model",
        "engine-0 token equality",
        "engine-0 flags",
        "engine-0 events flow",
        "engine-0 block size",
        "engine-0 salt",
        "engine-0 connector loaded",
        "engine-0 connector",
        "store",
        "gateway",
    ):
        assert f"ok    {check}: " in done.stdout


def test_doctor_finds_what_does_not_fit(stack: Any, tmp_path: Any) -> None:
    """A block size that is not the engine's, and a model that it does not serve."""
    config = json.loads(stack.config_file.read_text())
    config["engines"][0]["block_size"] = 64
    file = tmp_path / "wrong.yaml"
    file.write_text(json.dumps(config))
    done = headstart("doctor", "--config", str(file))
    assert done.returncode == 1
    assert "the engine's blocks have 32 tokens, engines[].block_size says 64" in done.stdout

    config["model"]["name"] = "other"
    file.write_text(json.dumps(config))
    done = headstart("doctor", "--config", str(file))
    assert done.returncode == 1
    assert "serves smollm2-135m-instruct, not other" in done.stdout


def test_stats_come_as_a_table_and_as_json(stack: Any) -> None:
    """The same numbers for people and for programs."""
    stack.complete([5, 6, 7], max_tokens=1, url=stack.gateway_url)
    as_json = headstart("stats", "--url", stack.gateway_url, "--json")
    assert json.loads(as_json.stdout)["total"]["windows"]["since_start"]["requests"]["total"] >= 1
    table = headstart("stats", "--url", stack.gateway_url, "--window", "1h")
    assert table.returncode == 0, table.stderr
    assert "last hour" in table.stdout

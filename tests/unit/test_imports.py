"""Imports go one way, and heavy libraries stay where they belong."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINTER = Path(sys.executable).with_name("lint-imports")


def lint(directory: Path) -> subprocess.CompletedProcess[str]:
    command = [str(LINTER), "--no-cache"]
    return subprocess.run(
        command, cwd=directory, capture_output=True, text=True, check=False, env={"PYTHONPATH": "."}
    )


def test_all_contracts_hold() -> None:
    """What pyproject.toml says of imports is true."""
    done = lint(ROOT)
    assert done.returncode == 0, done.stdout
    assert "0 broken" in done.stdout


@pytest.mark.parametrize(
    ("module", "statement"),
    [
        ("policies/base.py", "import prefix_store"),
        ("prefix_store/base.py", "import engine_adapter"),
        ("engine_adapter/base.py", "import gateway"),
        ("gateway/request/proxy.py", "import aiohttp"),
        ("gateway/serve.py", "import zmq"),
        ("engine_adapter/rendering.py", "import torch"),
        ("gateway/serve.py", "import engine_adapter.device"),
    ],
)
def test_a_wrong_import_is_found(module: str, statement: str, tmp_path: Path) -> None:
    """The contracts bite: each is broken once in a copy."""
    for package in ("policies", "prefix_store", "engine_adapter", "gateway"):
        shutil.copytree(ROOT / package, tmp_path / package)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    file = tmp_path / module
    file.write_text(file.read_text() + f"\n{statement}\n")
    done = lint(tmp_path)
    assert done.returncode == 1
    assert "1 broken" in done.stdout


@pytest.mark.parametrize(
    "module",
    ["gateway.cli.main", "gateway.cli.stats", "gateway.cli.replicas", "engine_adapter.launcher"],
)
def test_light_commands_load_nothing_heavy(module: str) -> None:
    """`headstart stats` and `headstart engine --print` answer at once."""
    heavy = "{'torch', 'vllm', 'transformers', 'aiohttp'}"
    code = f"import sys, {module}; sys.exit(str({heavy} & set(sys.modules) or ''))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.stderr.strip() == ""


def test_gateway_loads_without_torch_and_vllm() -> None:
    """The gateway's container has neither."""
    code = "import sys, gateway.serve; sys.exit(str({'torch', 'vllm'} & set(sys.modules) or ''))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.stderr.strip() == ""

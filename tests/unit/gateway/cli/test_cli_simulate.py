"""`headstart simulate` from the command line: tables, files, tiers, mistakes, Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gateway.cli.main import USER_ERROR, main
from gateway.cli.simulate import parse_capacity, parse_policy
from gateway.settings.user_error import UserError
from policies.eviction import FifoEviction, LruEviction
from prefix_store.simulation.grid import Foresight


def write_trace(path: Path, num_requests: int = 60) -> Path:
    """Six sessions that take turns, each a bit longer every time."""
    lines = []
    for i in range(num_requests):
        session, turn = i % 6, i // 6
        ids = [session * 1000 + block for block in range(2 + turn)]
        lines.append(
            {
                "timestamp": i * 1000, "input_length": 512 * len(ids), "output_length": 9,
                "hash_ids": ids, "session_id": f"s{session}", "stop": "tool_use", "api_time": 0.5,
            }
        )  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def simulate(*arguments: object) -> int:
    return main(["simulate", *map(str, arguments)])


def test_table_json_and_plots_of_one_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Processes, both policies, the optimum, and the same figures everywhere."""
    trace, out = write_trace(tmp_path / "t.jsonl"), tmp_path / "out.json"
    code = simulate(
        "--trace", trace, "--capacity", "16k,24k", "--capacity", "1M", "--policy", "lru",
        "--policy", "fifo", "--json", out, "--plot", tmp_path / "a.svg", "--jobs", 2,
    )  # fmt: skip
    assert code == 0
    document = json.loads(out.read_text())
    results = document["results"]
    assert [(r["capacity_tokens"], r["policy"]) for r in results] == [
        (capacity, policy)
        for capacity in (16_000, 24_000, 1_000_000) for policy in ("lru", "fifo", "optimum")
    ]  # fmt: skip
    assert document["requests"] == 60
    text = capsys.readouterr().out
    for result in results:
        assert 0 <= result["token_hit_rate"] <= 1
        assert result["gap_to_optimum"] >= 0
        assert f"{result['token_hit_rate']:.1%}" in text
    assert results[-1]["token_hit_rate"] == results[-2]["token_hit_rate"], "nothing is evicted"
    assert (tmp_path / "a.svg").read_text().startswith("<?xml")


def test_png_is_drawn_in_this_process(tmp_path: Path) -> None:
    """One job, one policy."""
    trace, plot = write_trace(tmp_path / "t"), tmp_path / "a.png"
    assert simulate("--trace", trace, "--capacity", "10k", "--jobs", 1, "--plot", plot) == 0
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_tiers_come_from_the_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What memory evicts is served by the disk below it."""
    trace, out = write_trace(tmp_path / "t"), tmp_path / "out.json"
    config = tmp_path / "headstart.yaml"
    config.write_text(
        "store:\n  memory: {capacity: 10MiB, eviction: {kind: fifo}}\n"
        "  disk: {path: /nowhere, capacity: 1GiB}\n"
    )
    arguments = ("--trace", trace, "--config", config, "--token-bytes", "1KiB", "--json", out)
    assert simulate(*arguments) == 0
    layered, optimum = json.loads(out.read_text())["results"]
    assert layered["policy"] == "fifo"
    assert [tier["name"] for tier in layered["tiers"]] == ["memory", "disk"]
    assert layered["moved_bytes"] > 0
    assert layered["token_hit_rate"] == optimum["token_hit_rate"]
    assert "disk" in capsys.readouterr().out
    assert simulate(*arguments, "--policy", "lru", "--capacity", "5k", "--no-optimum") == 0
    (replaced,) = json.loads(out.read_text())["results"]
    assert replaced["policy"] == "lru"
    assert replaced["tiers"][0]["capacity_bytes"] == 5000 * 1024


def test_retention_rules_of_the_configuration_hold(tmp_path: Path) -> None:
    """A pinned session hits where its blocks would have gone."""
    trace, out = write_trace(tmp_path / "t"), tmp_path / "out.json"
    config = tmp_path / "headstart.yaml"
    memory = "store:\n  memory: {capacity: 8MiB, pin_budget: 8MiB}\n"
    rule = "  retention: [{match: {session: s0}, ttl: 1h, pin: true}]\n"
    hits = []
    for text in (memory, memory + rule):
        config.write_text(text)
        arguments = ("--trace", trace, "--config", config, "--token-bytes", "1KiB")
        assert simulate(*arguments, "--no-optimum", "--json", out) == 0
        hits.append(json.loads(out.read_text())["results"][0]["hit_tokens"])
    assert hits[1] > hits[0]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "give --capacity"),
        (("--capacity", "0"), "at least one token"),
        (("--capacity", "many"), "write tokens such as"),
        (("--capacity=-1M",), "at least one token"),
        (("--capacity", "1M", "--policy", "best"), "unknown policy; use one of: lru"),
        (("--capacity", "1M", "--policy", "{kind: lru, x: 1}"), "lru.x"),
        (("--capacity", "1M", "--warm-up", "1"), "less than 1"),
        (("--capacity", "1M", "--jobs", "0"), "--jobs 0"),
        (("--capacity", "1M", "--token-bytes", "0"), "--token-bytes 0"),
        (("--capacity", "1M", "--prefill-curve", "1,2"), "prefill curve"),
        (("--capacity", "1M", "--plot", "a.pdf"), ".png or .svg"),
        (("--capacity", "1M", "--json", "/no/such/dir/x"), "directory that exists"),
        (("--config", "/no/such/file"), "cannot be read"),
    ],
)
def test_mistakes_are_one_sentence(
    arguments: tuple[str, ...],
    sentence: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On stderr, before any long work, with exit code 2."""
    assert simulate("--trace", write_trace(tmp_path / "t", 2), *arguments) == USER_ERROR
    text = capsys.readouterr().err
    assert sentence in text
    assert text.startswith("headstart: ")
    assert text.count("\n") == 1


def test_unreadable_trace_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    """With its name."""
    assert simulate("--trace", "/no/such/trace", "--capacity", "1M") == USER_ERROR
    assert "/no/such/trace: cannot be read" in capsys.readouterr().err


def test_store_that_is_switched_off_cannot_be_simulated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """There is nothing in it."""
    config = tmp_path / "c.yaml"
    config.write_text("store: null\n")
    trace = write_trace(tmp_path / "t", 2)
    assert simulate("--trace", trace, "--config", config) == USER_ERROR
    assert "nothing to simulate" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "size"),
    [("300k", 3e5), ("1M", 1e6), ("1.5m", 1.5e6), ("2G", 2e9), ("512", 512), ("1GiB", 2**30 / 8)],
)
def test_capacities_are_tokens_or_bytes(text: str, size: float) -> None:
    """With 8 bytes to a token."""
    assert parse_capacity(text, 8) == size * 8


def test_policies_are_kinds_or_mappings() -> None:
    """As in the configuration."""
    assert parse_policy("fifo") == FifoEviction()
    assert parse_policy("{kind: lru}") == LruEviction()
    assert parse_policy("belady") is Foresight.BELADY
    with pytest.raises(UserError, match="not valid YAML"):
        parse_policy("{kind: [")


def children_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ctrl_c_ends_all_processes_quietly(tmp_path: Path) -> None:
    """No traceback, exit code 130, nobody left."""
    # Ids that never come again: seconds of work, whatever the machine.
    trace = tmp_path / "t"
    lines: list[dict[str, Any]] = [
        {"timestamp": i, "input_length": 512, "hash_ids": list(range(i * 500, i * 500 + 500))}
        for i in range(2000)
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = [sys.executable, "-m", "gateway.cli", "simulate", "--trace", str(trace),
               "--capacity", "20k,30k,40k,50k", "--jobs", "2"]  # fmt: skip
    running = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    children: list[str] = []
    while len(children) < 2 and running.poll() is None:
        children = children_of(running.pid)
    os.killpg(running.pid, signal.SIGINT)
    _, errors = running.communicate(timeout=60)
    assert errors == ""
    assert running.returncode == 130
    assert not any(Path(f"/proc/{child}").exists() for child in children)

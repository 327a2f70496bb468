"""`headstart demo` on the real engine: the reuse happens, and Ctrl-C leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

MARK = "HEADSTART_TEST_MARK"


def parents() -> dict[int, int]:
    """Process -> its parent, zombies aside."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = entry.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state != "Z":
            found[int(entry.parent.name)] = int(parent)
    return found


def tree_of(root: int) -> set[int]:
    """A process and everything below it."""
    parent_of, tree = parents(), {root}
    while more := {pid for pid, parent in parent_of.items() if parent in tree} - tree:
        tree |= more
    return tree & parent_of.keys()


def marked(mark: str) -> set[int]:
    """Whoever inherited our mark; vLLM's renamed processes have overwritten theirs."""
    found = set()
    for pid in parents():
        try:
            if f"{MARK}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes():
                found.add(pid)
        except OSError:
            continue  # gone, or not ours
    return found


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def mapped_shared_memory() -> str:
    """What living processes map of it: other tests may run engines of their own."""
    maps = []
    for entry in Path("/proc").glob("[0-9]*/maps"):
        try:
            maps.append(entry.read_text())
        except OSError:
            continue
    return "\n".join(maps)


class RunningDemo:
    """A demo whose output is read as it comes."""

    def __init__(self, directory: Path) -> None:
        self.mark = uuid.uuid4().hex
        self.runtime = Path(tempfile.mkdtemp(prefix="hs-", dir="/tmp"))  # short, for sockets
        self._output = directory / "output"
        env = {
            **os.environ,
            MARK: self.mark,
            "XDG_RUNTIME_DIR": str(self.runtime),
            "XDG_STATE_HOME": str(directory / "state"),
            "COLUMNS": "120",
        }
        with self._output.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "gateway.cli", "demo"],
                env=env,
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def wait_for(self, text: str) -> None:
        """Until the demo has said it; fails with its output when it ends before."""
        while text not in self.output():
            if self.process.poll() is not None:
                pytest.fail(f"the demo ended with {self.process.returncode}:\n{self.output()}")
            time.sleep(0.1)

    def end(self) -> None:
        """Kill what a failed test left; the directory of the sockets goes too."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        while marked(self.mark):
            time.sleep(0.1)
        for path in sorted(self.runtime.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        self.runtime.rmdir()


@pytest.fixture
def demos(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningDemo, RunningDemo]]:
    """Two that start together: most of that time they import on one core."""
    both = [RunningDemo(tmp_path_factory.mktemp(name)) for name in ("one", "other")]
    yield both[0], both[1]
    for demo in both:
        demo.end()


def test_demo_shows_the_reuse_and_leaves_nothing(demos: tuple[RunningDemo, RunningDemo]) -> None:
    """One is killed in the middle of its engine's start: nobody is left to clean up, and yet. The
    other tells the whole story by the engine's own numbers; after Ctrl-C every trace goes."""
    demo, killed = demos
    before = shared_memory()
    kill_while_the_engine_starts(killed)
    demo.wait_for("Ctrl-C stops everything.")
    output = demo.output()
    assert "missing:" not in output
    assert re.search(r"The new engine never computed the system prompt's \d{4} tokens", output)
    assert "/cache/stats" in output
    assert "curl -s http://127.0.0.1:" in output
    tree = tree_of(demo.process.pid)
    assert len(tree) >= 9  # demo; guard and child of store, gateway, engine; its core and worker

    demo.process.send_signal(signal.SIGINT)
    assert demo.process.wait() == 0

    assert (tree & parents().keys()) | marked(demo.mark) == set()
    assert list(demo.runtime.iterdir()) == []
    mapped = mapped_shared_memory()
    assert {name for name in shared_memory() - before if name not in mapped} == set()


def kill_while_the_engine_starts(demo: RunningDemo) -> None:
    """SIGKILL; returns when all that it had started is gone."""
    demo.wait_for("starting vLLM")
    while len(tree := tree_of(demo.process.pid)) < 7:  # also the engine's core
        time.sleep(0.05)
    demo.process.send_signal(signal.SIGKILL)
    demo.process.wait()
    while (tree & parents().keys()) | marked(demo.mark):
        time.sleep(0.05)

"""Children end with us, with their whole tree, and say why they failed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from gateway.local.child_guard import RotatingLog
from gateway.local.children import Child, ChildError, Children, ChildSpec, tail

# A child with a grandchild that ignores SIGTERM, like an engine core whose parent was killed.
FAMILY = """
import os, pathlib, signal, subprocess, sys, time
code = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "print('up', flush=True); time.sleep(600)"
)
grandchild = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
grandchild.stdout.readline()
pathlib.Path(sys.argv[1]).write_text(f"{os.getpid()} {grandchild.pid}")
time.sleep(600)
"""


def family(tmp_path: Path) -> ChildSpec:
    argv = (sys.executable, "-c", FAMILY, str(tmp_path / "pids"))
    return ChildSpec("family", argv, tmp_path / "family.log", grace_s=5.0)


def script(tmp_path: Path, code: str) -> ChildSpec:
    return ChildSpec("script", (sys.executable, "-c", code), tmp_path / "script.log")


async def never() -> bool:
    return False


def pids_of(path: Path) -> list[int]:
    """Waits until the family has written its process ids down."""
    while len(pids := path.read_text().split() if path.exists() else []) < 2:
        time.sleep(0.02)
    return [int(pid) for pid in pids]


def is_running(pid: int) -> bool:
    """Zombies do not count: whoever inherits them decides when they are collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # gone before, or while it was read
        return False


def wait_until_gone(pids: list[int]) -> None:
    while any(is_running(pid) for pid in pids):
        time.sleep(0.02)


async def test_stop_ends_child_and_stubborn_grandchild(tmp_path: Path) -> None:
    """When stop returns, nothing of the tree is left."""
    async with Children() as children:
        child = await children.start(family(tmp_path))
        pids = await asyncio.to_thread(pids_of, tmp_path / "pids")
        await children.stop(child)
        assert [pid for pid in pids if is_running(pid)] == []


async def test_grandchild_ends_when_the_child_is_killed(tmp_path: Path) -> None:
    """A child that dies by SIGKILL takes what it started with it."""
    async with Children() as children:
        child = await children.start(family(tmp_path))
        pids = await asyncio.to_thread(pids_of, tmp_path / "pids")
        os.kill(pids[0], signal.SIGKILL)
        assert await child.wait() == 128 + signal.SIGKILL
        assert [pid for pid in pids if is_running(pid)] == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_tree_ends_when_we_are_killed(tmp_path: Path, number: signal.Signals) -> None:
    """Even SIGKILL of the owner leaves no child behind."""
    code = textwrap.dedent(f"""
        import asyncio, sys
        from pathlib import Path
        from gateway.local.children import Children, ChildSpec
        async def main():
            async with Children() as children:
                argv = (sys.executable, "-c", {FAMILY!r}, {str(tmp_path / "pids")!r})
                log = Path({str(tmp_path / "family.log")!r})
                child = await children.start(ChildSpec("family", argv, log, grace_s=5.0))
                await child.wait()
        asyncio.run(main())
    """)
    with subprocess.Popen([sys.executable, "-c", code]) as owner:
        pids = pids_of(tmp_path / "pids")
        owner.send_signal(number)
    wait_until_gone(pids)


async def test_children_stop_in_reverse_order(tmp_path: Path) -> None:
    """The store is started first and ends last."""
    ends = tmp_path / "ends"
    code = (
        "import signal, sys, time\n"
        "def end(*_):\n"
        "    open({path!r}, 'a').write({name!r}); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end); print('up', flush=True); time.sleep(600)"
    )
    async with Children() as children:
        for name in ("a", "b", "c"):
            argv = (sys.executable, "-c", code.format(path=str(ends), name=name))
            spec = ChildSpec(name, argv, tmp_path / f"{name}.log")
            child = await children.start(spec)

            async def is_up(log: Path = spec.log) -> bool:
                return "up" in tail(log, 100)

            await child.ready(is_up, timeout_s=60)
    assert ends.read_text() == "cba"


async def test_failure_names_the_reason_from_the_log(tmp_path: Path) -> None:
    """A child that ends before it is ready is reported with its last line."""
    spec = script(tmp_path, "import sys; sys.exit('headstart: the port is in use')")
    async with Children() as children:
        child = await children.start(spec)
        with pytest.raises(ChildError, match="ended with exit code 1: the port is in use"):
            await child.ready(never, timeout_s=60)


async def test_child_that_does_not_get_ready_is_reported(tmp_path: Path) -> None:
    """Waiting for readiness has an end."""
    async with Children() as children:
        child = await children.start(script(tmp_path, "import time; time.sleep(600)"))
        with pytest.raises(ChildError, match="was not ready after 0 s"):
            await child.ready(never, timeout_s=0)


async def test_command_that_does_not_exist_is_reported(tmp_path: Path) -> None:
    """A missing program is a plain failure."""
    async with Children() as children:
        child = await children.start(ChildSpec("x", ("/no/such/program",), tmp_path / "x.log"))
        with pytest.raises(ChildError, match="/no/such/program: not found"):
            await child.ready(never, timeout_s=60)


async def test_environment_reaches_the_child(tmp_path: Path) -> None:
    """What a spec sets stands on top of our own environment."""
    code = "import os; print(os.environ['HEADSTART_TEST'], 'PATH' in os.environ)"
    spec = ChildSpec(
        "env", (sys.executable, "-c", code), tmp_path / "env.log", env={"HEADSTART_TEST": "here"}
    )
    child = await Child.start(spec)
    assert await child.wait() == 0
    assert await child.stop() == 0
    assert spec.log.read_text() == "here True\n"


def test_log_stays_bounded_and_keeps_the_newest(tmp_path: Path) -> None:
    """A full log becomes FILE.1; an older one is gone."""
    log = RotatingLog(tmp_path / "a.log", max_bytes=10)
    for text in (b"first----", b"second---", b"third----"):
        log.write(text)
    assert (tmp_path / "a.log").read_bytes() == b"third----"
    assert (tmp_path / "a.log.1").read_bytes() == b"second---"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.log", "a.log.1"]


def test_log_of_the_last_start_is_kept(tmp_path: Path) -> None:
    """A restart does not destroy the log that tells why."""
    RotatingLog(tmp_path / "a.log").write(b"old")
    RotatingLog(tmp_path / "a.log").write(b"new")
    assert (tmp_path / "a.log.1").read_bytes() == b"old"
    assert (tmp_path / "a.log").read_bytes() == b"new"


async def test_killed_child_is_reported_by_its_signal(tmp_path: Path) -> None:
    """The last line of its log would be no reason."""
    code = (
        "import os, signal; print('all is well', flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    async with Children() as children:
        child = await children.start(script(tmp_path, code))
        with pytest.raises(ChildError, match=r"script was ended by SIGKILL \(log: "):
            await child.ready(never, timeout_s=60)


async def test_resource_tracker_gets_time_to_remove_shared_memory(tmp_path: Path) -> None:
    """A killed engine must not leave its shared memory behind: the tracker, which ignores SIGTERM,
    removes it once every process of the tree is gone."""
    code = (
        "import os, signal, sys\n"
        "from multiprocessing.shared_memory import SharedMemory\n"
        "memory = SharedMemory(create=True, size=4096)\n"
        "open(sys.argv[1], 'w').write(memory.name)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    argv = (sys.executable, "-c", code, str(tmp_path / "name"))
    child = await Child.start(ChildSpec("memory", argv, tmp_path / "memory.log"))
    await child.wait()
    await child.stop()
    name = (tmp_path / "name").read_text()
    assert name
    assert name not in os.listdir("/dev/shm")


async def test_a_child_whose_start_was_cancelled_is_stopped_too(tmp_path: Path) -> None:
    """However far the start had come: leaving the block ends it, and nothing is left."""
    async with Children() as children:
        for turns in range(6):
            starting = asyncio.create_task(
                children.start(script(tmp_path, "import time; time.sleep(600)"))
            )
            for _ in range(turns):
                await asyncio.sleep(0)
            starting.cancel()
            await asyncio.wait([starting])
        started = [child.pid for child in children._running]
    assert started
    assert not [pid for pid in started if is_running(pid)]

"""A small process that stands between us and a child, so that the child's whole tree ends with us.

`python -m gateway.child_guard --grace SECONDS --log FILE -- COMMAND...`

It ends the tree when its standard input closes (we are gone, however we went), on SIGTERM, and
when the command itself ends and leaves processes behind: vLLM's engine core is a grandchild, and a
killed API server would leave it. As a subreaper it inherits every orphan of the tree (Linux). The
command's output goes to a log of bounded size. The exit code is the command's.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
LOG_BYTES = 8 * 1024 * 1024
"""One older file of this size is kept beside the log."""
ORPHAN_GRACE_S = 2.0
TRACKER_GRACE_S = 4.0
"""Python's resource tracker removes the shared memory of killed processes once they are gone."""


class RotatingLog:
    """Appends bytes to a file; a full file becomes FILE.1."""

    def __init__(self, path: Path, max_bytes: int = LOG_BYTES) -> None:
        self._path = path
        self._max_bytes = max_bytes
        path.parent.mkdir(parents=True, exist_ok=True)
        self._rotate_old()

    def _rotate_old(self) -> None:
        if self._path.exists():
            self._path.replace(self._path.with_name(self._path.name + ".1"))
        # Prompts can stand in an engine's log.
        self._fd = os.open(self._path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        self._size = 0

    def write(self, data: bytes) -> None:
        if self._size + len(data) > self._max_bytes:
            os.close(self._fd)
            self._rotate_old()
        # A full disk must not end the engine.
        with contextlib.suppress(OSError):
            os.write(self._fd, data)
        self._size += len(data)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


class Guard:
    """One command and everything that it starts."""

    def __init__(self, command: list[str], log: RotatingLog, grace_s: float) -> None:
        self._log = log
        self._grace_s = grace_s
        self._kill_at: float | None = None
        self._exit_code: int | None = None
        _prctl(PR_SET_CHILD_SUBREAPER, 1)
        self._wake, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)
        self._output, output_write = os.pipe()
        self._pid = os.posix_spawnp(
            command[0],
            command,
            os.environ,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, output_write, 1),
                (os.POSIX_SPAWN_DUP2, output_write, 2),
            ],
            setsigdef=[signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGPIPE],
        )
        os.close(output_write)

    def run(self) -> int:
        """Until the command has ended and nothing of its tree is left."""
        watched = {0, self._wake, self._output}
        while self._exit_code is None:
            for fd in select.select(sorted(watched), [], [], self._patience())[0]:
                data = os.read(fd, 65536)
                if fd == self._output:
                    self._log.write(data)
                if fd == 0 or (fd == self._wake and _asks_to_end(data)):
                    self._end()
                if not data:
                    watched.discard(fd)
            self._reap()
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                os.kill(self._pid, signal.SIGKILL)
                self._kill_at = time.monotonic() + 1.0
        self._end_orphans()
        return self._exit_code

    def _patience(self) -> float | None:
        if self._kill_at is None:
            return None
        return max(0.0, self._kill_at - time.monotonic())

    def _end(self) -> None:
        if self._kill_at is None:
            os.kill(self._pid, signal.SIGTERM)
            self._kill_at = time.monotonic() + self._grace_s

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self._pid:
                    code = os.waitstatus_to_exitcode(ended[1])
                    self._exit_code = code if code >= 0 else 128 - code

    def _end_orphans(self) -> None:
        """Whatever the command left behind: asked first, killed soon."""
        began = time.monotonic()
        asked: set[int] = set()
        while orphans := children_of(os.getpid()):
            waited_s = time.monotonic() - began
            for pid in orphans:
                late = waited_s >= (TRACKER_GRACE_S if _is_tracker(pid) else ORPHAN_GRACE_S)
                if late or pid not in asked:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
                asked.add(pid)
            time.sleep(0.02)
            self._reap()
        os.set_blocking(self._output, False)
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._output, 65536):
                self._log.write(data)


def _asks_to_end(wakeups: bytes) -> bool:
    return signal.SIGTERM in wakeups or signal.SIGINT in wakeups


def _is_tracker(pid: int) -> bool:
    try:
        return b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def children_of(pid: int) -> list[int]:
    """Processes whose parent is `pid`; empty where there is no /proc."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # pid (name) state ppid ...: the name may hold anything, also parentheses.
            if int(entry.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(entry.parent.name))
    return found


def main() -> int:
    """Run the command that the arguments name."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--grace", type=float, required=True)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()
    log = RotatingLog(args.log)
    try:
        return Guard(args.command, log, args.grace).run()
    except FileNotFoundError:
        log.write(f"{args.command[0]}: not found\n".encode())
        return 127


if __name__ == "__main__":
    sys.exit(main())

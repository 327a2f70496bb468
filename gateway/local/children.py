"""Child processes of this process: store, engine, gateway. None of them outlives it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from gateway.settings.user_error import UserError

Probe = Callable[[], Awaitable[bool]]
"""Whether the child is ready now."""


SIGNALLED = 128
"""Exit codes above this tell the signal, as in a shell."""


class ChildError(UserError):
    """A child did not start or ended too early; the message says why, from its log."""


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """How to start one child."""

    name: str
    argv: tuple[str, ...]
    log: Path
    env: Mapping[str, str] = field(default_factory=dict)
    """On top of our own environment."""
    grace_s: float = 10.0
    """From SIGTERM to SIGKILL."""
    explain: Callable[[str], str | None] | None = None
    """Finds the line of its log that tells what went wrong."""


class Child:
    """A started child with its guard (see child_guard.py): its whole tree ends with us."""

    def __init__(self, spec: ChildSpec, process: asyncio.subprocess.Process) -> None:
        self.spec = spec
        self._process = process

    @classmethod
    async def start(cls, spec: ChildSpec) -> Child:
        """Start it; it need not be ready when this returns."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "gateway.local.child_guard"),
            *("--grace", str(spec.grace_s), "--log", str(spec.log), "--", *spec.argv),
            env={**os.environ, **spec.env},
            stdin=asyncio.subprocess.PIPE,
            # Ctrl-C at the terminal is for us alone: we end the children in order.
            start_new_session=True,
        )
        return cls(spec, process)

    @property
    def pid(self) -> int:
        """Process id of the guard."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.returncode

    @property
    def ending(self) -> str:
        """How it ended, in words."""
        code = self.exit_code or 0
        if code > SIGNALLED and code - SIGNALLED in signal.valid_signals():
            return f"was ended by {signal.Signals(code - SIGNALLED).name}"
        return f"ended with exit code {code}"

    async def wait(self) -> int:
        """Its exit code, once it has ended."""
        return await self._process.wait()

    async def stop(self) -> int:
        """Ask it to end and wait until its whole tree is gone. Idempotent."""
        if self._process.returncode is None and self._process.stdin is not None:
            self._process.stdin.close()
        return await self._process.wait()

    async def ready(self, probe: Probe, *, timeout_s: float, interval_s: float = 0.1) -> None:
        """Wait until the probe says yes. ChildError when the child ends or takes too long."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not await probe():
            if self.exit_code is not None:
                raise ChildError(self.failure(self.ending))
            if asyncio.get_running_loop().time() > deadline:
                raise ChildError(self.failure(f"was not ready after {timeout_s:.0f} s"))
            await asyncio.sleep(interval_s)

    def failure(self, what: str) -> str:
        """A sentence with the reason that the log gives."""
        # Whoever was killed had no chance to say why.
        reason = None if (self.exit_code or 0) > SIGNALLED else self._reason()
        because = f": {reason}" if reason else ""
        return f"{self.spec.name} {what}{because} (log: {self.spec.log})"

    def _reason(self) -> str | None:
        text = tail(self.spec.log, 64 * 1024)
        if self.spec.explain is not None:
            return self.spec.explain(text)
        lines = text.strip().splitlines()
        return lines[-1].removeprefix("headstart: ") if lines else None


def tail(path: Path, num_bytes: int) -> str:
    """The end of a text file; empty when there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - num_bytes))
            return file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""


class Children:
    """Owns children and stops them in reverse order: `async with Children() as children`."""

    def __init__(self) -> None:
        self._running: list[Child] = []

    async def start(self, spec: ChildSpec) -> Child:
        """Start one more child. One whose start is cancelled half-way is still owned here."""
        starting = asyncio.ensure_future(Child.start(spec))
        starting.add_done_callback(self._own)
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            await asyncio.wait([starting])
            raise

    def _own(self, starting: asyncio.Future[Child]) -> None:
        if not starting.cancelled() and starting.exception() is None:
            self._running.append(starting.result())

    async def stop(self, child: Child) -> None:
        """Stop one of them now."""
        await child.stop()
        if child in self._running:
            self._running.remove(child)

    async def __aenter__(self) -> Children:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        while self._running:
            # A second Ctrl-C cancels this wait; closing our end of the pipes still ends them.
            await self._running[-1].stop()
            self._running.pop()

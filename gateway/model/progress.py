"""Shows how fetching the model goes: a bar on a terminal, a line a step elsewhere."""

from __future__ import annotations

from typing import TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


class TerminalProgress:
    """One line for each step; nothing is shown when nothing has to be done."""

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream)
        self._bar: Progress | None = None

    def step(self, text: str, *, total_bytes: int | None = None) -> None:
        self.close()
        if total_bytes is None or not self._console.is_terminal:
            size = "" if total_bytes is None else f", {total_bytes / 1e6:.0f} MB"
            self._console.print(f"model: {text}{size}", highlight=False)
            return
        self._bar = Progress(
            TextColumn("model: {task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._bar.add_task(text, total=total_bytes)
        self._bar.start()

    def bytes_done(self, num_bytes: int) -> None:
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=num_bytes)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

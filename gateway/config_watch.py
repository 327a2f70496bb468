"""Notices that the configuration is to be read again: SIGHUP, or a file that has changed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

from gateway.config_file import ConfigError, load_config
from policies.config import HeadstartConfig

POLL_S = 1.0

Apply = Callable[[HeadstartConfig], Awaitable[None]]
Refuse = Callable[[str], None]


class ConfigWatch:
    """Runs until cancelled. A file that cannot be used is refused once, with the reason."""

    def __init__(self, path: Path | None, apply: Apply, refuse: Refuse) -> None:
        self._path = path
        self._apply = apply
        self._refuse = refuse
        self._asked = asyncio.Event()

    async def run(self) -> None:
        """SIGHUP is caught from here on, also where there is no file to watch."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, self._asked.set)
        seen = self._stamp()
        try:
            while True:
                try:
                    async with asyncio.timeout(POLL_S):
                        await self._asked.wait()
                except TimeoutError:
                    if self._stamp() == seen:
                        continue
                self._asked.clear()
                seen = self._stamp()
                await self._reload()
        finally:
            loop.remove_signal_handler(signal.SIGHUP)

    async def _reload(self) -> None:
        try:
            config = await asyncio.to_thread(load_config, self._path)
        except ConfigError as error:
            self._refuse(str(error))
            return
        await self._apply(config)

    def _stamp(self) -> tuple[int, int, int] | None:
        """None while the file is away: editors replace files."""
        if self._path is None:
            return None
        try:
            status = os.stat(self._path)
        except OSError:
            return None
        return (status.st_mtime_ns, status.st_size, status.st_ino)

"""Notices that the configuration is to be read again: SIGHUP, or a file that has changed."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

from gateway.settings.config_file import ConfigError, load_config
from gateway.settings.file_stamp import FileStamp
from policies.config import HeadstartConfig

logger = logging.getLogger(__name__)

POLL_S = 0.5

Apply = Callable[[HeadstartConfig], Awaitable[None]]
Refuse = Callable[[str], Awaitable[None]]


class ConfigWatch:
    """Make it when the file is read, so that no change after that is missed."""

    def __init__(
        self, path: Path | None, apply: Apply, refuse: Refuse, *, poll_s: float = POLL_S
    ) -> None:
        """`refuse` gets the reason why a file cannot be used, once for each change of it."""
        self._path = path
        self._apply = apply
        self._refuse = refuse
        self._poll_s = poll_s
        self._asked = asyncio.Event()
        self._stamp = FileStamp(path)

    async def run(self, ready: asyncio.Event | None = None) -> None:
        """Until cancelled. SIGHUP is caught from here on, also where there is no file to watch;
        nothing is applied before `ready`."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, self._asked.set)
        try:
            if ready is not None:
                await ready.wait()
            while True:
                await self._wait()
                await self._reload()
        finally:
            loop.remove_signal_handler(signal.SIGHUP)

    async def _wait(self) -> None:
        """Until SIGHUP, or until the file has changed."""
        while True:
            try:
                async with asyncio.timeout(self._poll_s):
                    await self._asked.wait()
            except TimeoutError:
                if self._stamp.changed():
                    break
            else:
                self._asked.clear()
                break
        self._stamp.take()

    async def _reload(self) -> None:
        try:
            config = await asyncio.to_thread(load_config, self._path)
        except ConfigError as error:
            await self._refuse(str(error))
            return
        try:
            await self._apply(config)
        except Exception as error:
            # The outermost boundary: the next file must still be seen.
            logger.exception("new settings could not be applied")
            await self._refuse(f"it could not be applied: {error}")

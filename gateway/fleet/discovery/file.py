"""Replicas that a watched file lists."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

from gateway.fleet.discovery.engine_list import read_engines
from gateway.fleet.discovery.known_replicas import KnownReplicas
from gateway.fleet.discovery.problem import Problem
from gateway.settings.config_errors import ConfigError
from gateway.settings.file_stamp import FileStamp
from policies import fleet
from policies.config import HeadstartConfig
from policies.engine import EngineConfig

POLL_S = 0.5


class FileDiscovery:
    """Read at the start and whenever it has changed and rested for one look. To change it in one
    step, write another file and rename it."""

    def __init__(
        self, settings: fleet.FileDiscovery, config: HeadstartConfig, *, poll_s: float = POLL_S
    ) -> None:
        """`config`: whose models and stores the entries may name."""
        self._path = Path(settings.path).expanduser()
        self._template = settings.engine
        self._config = config
        self._poll_s = poll_s
        self._problem = Problem("the list of replicas")

    @property
    def problem(self) -> str | None:
        """Why the file cannot be used."""
        return self._problem.reason

    async def lists(self) -> AsyncGenerator[Sequence[EngineConfig], None]:
        """As Discovery says."""
        known = KnownReplicas()
        stamp = FileStamp(self._path)
        while True:
            stamp.take()
            try:
                engines = await asyncio.to_thread(
                    read_engines, self._path, self._config, self._template
                )
            except ConfigError as error:
                self._problem.report(str(error), again=True)
            else:
                self._problem.solve()
                if known.learn(engines):
                    yield engines
            while True:
                await asyncio.sleep(self._poll_s)
                if stamp.changed():
                    break

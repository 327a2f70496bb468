"""Changes of the fleet during bench.soak: engines that restart, replicas that come and go."""

from __future__ import annotations

import asyncio
import json
import random
import urllib.request
from collections import Counter
from typing import Any

from bench.soak_fleet import SoakFleet

AWAY_S = 0.5
"""An engine that restarts is gone for so long."""


class Churn:
    """One change every `every_s`, in turn."""

    def __init__(self, fleet: SoakFleet, seed: int, every_s: float) -> None:
        self._fleet = fleet
        self._random = random.Random(seed)
        self._every_s = every_s
        self.counts: Counter[str] = Counter()
        """By what was done; what the gateway refused counts as such."""

    async def run(self) -> None:
        """Until cancelled."""
        changes = (self._restart, self._add, self._drain, self._remove)
        while True:
            for change in changes:
                await asyncio.sleep(self._every_s)
                await asyncio.to_thread(change)

    def _restart(self) -> None:
        engine = self._random.choice(self._fleet.simulated)
        self._do("restart", "POST", f"{engine['url']}/simulate/fault",
                 {"kind": "restart", "seconds": AWAY_S})  # fmt: skip

    def _add(self) -> None:
        for engine in self._fleet.spare:
            self._do("add", "POST", f"{self._fleet.url}/admin/replicas", engine)

    def _drain(self) -> None:
        for engine in self._fleet.spare:
            url = f"{self._fleet.url}/admin/replicas/{engine['id']}/drain"
            self._do("drain", "POST", url, {})

    def _remove(self) -> None:
        for engine in self._fleet.spare:
            url = f"{self._fleet.url}/admin/replicas/{engine['id']}"
            self._do("remove", "DELETE", url, None)

    def _do(self, what: str, method: str, url: str, body: dict[str, Any] | None) -> None:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        asked = urllib.request.Request(url, data, headers, method=method)
        try:
            with urllib.request.urlopen(asked, timeout=10.0):
                self.counts[what] += 1
        except OSError as error:
            self.counts[f"{what}: {getattr(error, 'code', None) or error}"] += 1

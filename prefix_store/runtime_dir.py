"""Where the sockets of this host are. Unix socket paths are short (107 bytes), so is this one."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from policies.config import EngineConfig, HeadstartConfig


@dataclass(frozen=True, slots=True)
class RuntimePaths:
    """Sockets and endpoints, each from the configuration or below `root`."""

    root: Path

    @classmethod
    def of(cls, config: HeadstartConfig) -> RuntimePaths:
        """The configured directory, else one of this user's own."""
        if config.runtime_dir is not None:
            return cls(Path(config.runtime_dir).expanduser().absolute())
        base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
        return cls(Path(base) / f"headstart-{os.getuid()}")

    def create(self) -> None:
        """Make the directory, readable for its owner only: events carry tokens and salts."""
        self.root.mkdir(parents=True, exist_ok=True, mode=0o700)

    def store_socket(self, config: HeadstartConfig) -> Path:
        socket = config.store.socket if config.store else None
        return self.root / (socket or "store.sock")

    def store_events(self, config: HeadstartConfig) -> str:
        endpoint = config.store.events if config.store else None
        return endpoint or f"ipc://{self.root}/store-events.sock"

    def store_replay(self, config: HeadstartConfig) -> str:
        endpoint = config.store.events_replay if config.store else None
        return endpoint or f"ipc://{self.root}/store-replay.sock"

    def engine_events(self, engine: EngineConfig) -> str:
        return engine.events or f"ipc://{self.root}/{engine.id}-events.sock"

    def engine_replay(self, engine: EngineConfig) -> str:
        return engine.events_replay or f"ipc://{self.root}/{engine.id}-replay.sock"

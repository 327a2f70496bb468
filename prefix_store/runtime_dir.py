"""Where the sockets of this host are. Unix socket paths are short (107 bytes), so is this one."""

from __future__ import annotations

import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from policies.config import HeadstartConfig
from policies.engine import EngineConfig
from prefix_store.base import StoreError


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
        """Make the directory, open to its owner only: events carry tokens and salts.

        Raises StoreError when it is, or could be, somebody else's.
        """
        try:
            self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
            directory = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError as error:
            raise self._refused(f"is no directory of ours ({error.strerror})") from None
        try:
            self._make_private(directory)
        except OSError as error:
            raise self._refused(f"cannot be made private ({error.strerror})") from None
        finally:
            os.close(directory)

    def _make_private(self, directory: int) -> None:
        status = os.fstat(directory)
        if status.st_uid != os.getuid():
            raise self._refused(f"belongs to user {status.st_uid}, not to us ({os.getuid()})")
        if status.st_mode & stat.S_ISVTX:  # such as /tmp itself: not ours alone to close
            raise self._refused("is a directory that all users share")
        if status.st_mode & 0o077:
            os.fchmod(directory, 0o700)

    def _refused(self, why: str) -> StoreError:
        return StoreError(
            f"the runtime directory {self.root} {why}: remove it, or set `runtime_dir` to a "
            "directory that only you can write to"
        )

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

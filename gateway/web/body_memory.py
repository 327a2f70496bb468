"""Bounds the memory of bodies whose requests have no place yet."""

from __future__ import annotations

from types import TracebackType

from gateway.web.errors import TooManyRequestsError


class BodyMemory:
    """So many bytes of bodies may be read or wait for a place at the same time."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._used_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Held now."""
        return self._used_bytes

    def take(self, num_bytes: int) -> None:
        """Raises TooManyRequestsError, and takes nothing, when that is too much."""
        if self._used_bytes + num_bytes > self._max_bytes:
            raise TooManyRequestsError(
                f"{self._used_bytes} bytes of other requests are being read or wait "
                "(limits.body_memory)",
                retry_after_s=1,
            )
        self._used_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        """What was taken before."""
        self._used_bytes -= num_bytes


class BodyShare:
    """What one body takes of it, piece by piece as it arrives; given back once, at the latest at
    the end of the block."""

    __slots__ = ("_memory", "_num_bytes")

    def __init__(self, memory: BodyMemory) -> None:
        self._memory = memory
        self._num_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Raises TooManyRequestsError."""
        self._memory.take(num_bytes)
        self._num_bytes += num_bytes

    def give_back(self) -> None:
        """All of it. Idempotent."""
        self._memory.give_back(self._num_bytes)
        self._num_bytes = 0

    def __enter__(self) -> BodyShare:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.give_back()

"""Messages of one event stream that wait to be applied. Bounded by number and by bytes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

MAX_MESSAGES = 8_192
MAX_BYTES = 64 * 1024**2


@dataclass(frozen=True, slots=True)
class Message:
    """A live batch."""

    sequence: int
    payload: bytes
    received_at: float
    """time.time()"""


class EventInbox:
    """First in, first out."""

    def __init__(self) -> None:
        self._messages: deque[Message] = deque()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._messages)

    def add(self, message: Message) -> bool:
        """False: there were too many, and all are dropped, this one too."""
        self._messages.append(message)
        self._num_bytes += len(message.payload)
        if len(self._messages) > MAX_MESSAGES or self._num_bytes > MAX_BYTES:
            self.clear()
            return False
        return True

    def pop(self) -> Message:
        """The oldest one; there must be one."""
        message = self._messages.popleft()
        self._num_bytes -= len(message.payload)
        return message

    def clear(self) -> None:
        """Drop all of them."""
        self._messages.clear()
        self._num_bytes = 0

    def waited_s(self, now: float) -> float:
        """How long the oldest one has been here; 0 when there is none."""
        return now - self._messages[0].received_at if self._messages else 0.0

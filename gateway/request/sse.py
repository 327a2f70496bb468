"""Server-sent events, cut out of a stream of bytes. No I/O.

An event ends with a blank line (WHATWG HTML, section 9.2). Lines end with LF or CR LF; bare CR as
a line end, which the specification also allows, is not used by any engine and not looked for.
"""

from __future__ import annotations

import re

DONE = b"[DONE]"
"""The data of the last event of an OpenAI stream."""

_EVENT_END = re.compile(rb"\n\r?\n")
_LINE_END = re.compile(rb"\r?\n")
_DATA = b"data:"


class SseScanner:
    """Cuts bytes into events, however they were split on the way.

    At most `max_event_bytes` are held back: of an event that is longer, the pieces are handed out
    as they come. All that is handed out, joined, is what was fed.
    """

    def __init__(self, max_event_bytes: int = 1024 * 1024) -> None:
        self._max_event_bytes = max_event_bytes
        self._held = bytearray()
        self._searched = 0
        """Up to here there is no end of an event in `_held`."""

    def feed(self, chunk: bytes) -> list[bytes]:
        """The events that `chunk` completes, each with its blank line."""
        if not self._held and _is_one_event(chunk):
            return [chunk]
        self._held += chunk
        events: list[bytes] = []
        start = 0
        for end in _EVENT_END.finditer(self._held, self._searched):
            events.append(bytes(self._held[start : end.end()]))
            start = end.end()
        del self._held[:start]
        # The end may be split: "\n" and "\n\r" at the end of what is held are looked at again.
        self._searched = max(0, len(self._held) - 2)
        if len(self._held) > self._max_event_bytes:
            events.append(self.flush())
        return events

    def flush(self) -> bytes:
        """What is held back: an event that has not ended."""
        rest = bytes(self._held)
        self._held.clear()
        self._searched = 0
        return rest


def event_data(event: bytes) -> bytes:
    """The data of one event: its data lines, joined by LF."""
    if event.startswith(b"data: ") and event.find(b"\n") == len(event) - 2 and _is_one_event(event):
        return event[6:-2]
    lines = [line[len(_DATA) :] for line in _LINE_END.split(event) if line.startswith(_DATA)]
    return b"\n".join(line.removeprefix(b" ") for line in lines)


def _is_one_event(chunk: bytes) -> bool:
    """True for exactly one event with LF line ends, as engines send them."""
    return chunk.endswith(b"\n\n") and chunk.find(b"\n\n") == len(chunk) - 2 and b"\r" not in chunk

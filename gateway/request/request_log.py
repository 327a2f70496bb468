"""A file of what was asked for, one JSON line a request, for `headstart simulate`.

Hashes only: of blocks, that are keyed by the tenant's salt, and of the clients' names of sessions
and prefixes, likewise. No text and no token stands in it. Names of tenants and models are those of
the configuration.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from gateway.accounts.record import Outcome, RequestRecord
from gateway.request.call import Call
from gateway.request.log_file import LogFile
from gateway.request.side_queue import SideQueue, SideQueueStats
from gateway.settings.user_error import UserError
from policies.config import RequestLogConfig
from prefix_store.base import BlockHash

log = logging.getLogger(__name__)

_MAX_WAITING = 200_000
"""Requests and blocks of theirs that wait for the disk: about 40 MB."""
_HASH_BYTES = 8
_ANSWERED = (Outcome.OK, Outcome.CANCELLED)


class LogLine(msgspec.Struct, frozen=True, kw_only=True):
    """One request that an engine answered, perhaps not to the end. The first four keys are
    those of published traces."""

    timestamp: float
    """Of its arrival, in milliseconds since 1970."""
    input_length: int
    """Prompt tokens, as the engine counts them where it said so."""
    output_length: int
    hash_ids: list[str]
    """Of its full blocks, heads first; each stands for itself and all before it. Empty where the
    prompt could not be rendered."""
    block_size: int
    session_id: str | None
    prefix: str | None
    turn: int
    stop: str
    tenant: str
    model: str
    api_time: float
    """Seconds until the answer was out."""
    ttft_ms: float | None
    """None where it was not seen."""
    cached_tokens: int | None
    """What was reused; None where the engine did not say."""


@dataclass(frozen=True, slots=True)
class _Entry:
    call: Call
    record: RequestRecord


class RequestLog:
    """Writes in a thread of its own; what that cannot do in time is dropped and counted."""

    def __init__(self, file: LogFile) -> None:
        self._file = file
        self._failing = False
        self._queue = SideQueue[_Entry](
            "request-log", self._write, expected=(OSError,), max_weight=_MAX_WAITING
        )

    @classmethod
    def open(cls, config: RequestLogConfig) -> RequestLog:
        """Raises UserError when it cannot be written at the start."""
        path = Path(config.path).expanduser()
        file = LogFile(path, max_bytes=int(config.max_size), keep=config.keep)
        try:
            file.open()
        except OSError as error:
            raise UserError(
                f"request_log.path: {path} cannot be written: {error.strerror or error}"
            ) from error
        return cls(file)

    def add(self, call: Call, record: RequestRecord) -> None:
        """A call that was recorded. Returns at once. Left out is what no engine answered: nothing
        of it was computed."""
        if call.sent is None or record.prompt is None or record.outcome not in _ANSWERED:
            return
        num_blocks = len(call.prompt.block_hashes) if call.prompt else 0
        self._queue.add(_Entry(call, record), weight=1 + num_blocks)

    def stats(self) -> SideQueueStats:
        return self._queue.stats()

    def close(self) -> None:
        """Write what waits. Idempotent."""
        self._queue.close()
        self._file.close()

    def _write(self, batch: list[_Entry]) -> None:
        lines = [msgspec.json.encode(_line_of(entry)) + b"\n" for entry in batch]
        try:
            self._file.write(lines)
        except OSError as error:
            if not self._failing:
                log.warning("request_log: %s; requests go on without it", error)
            self._failing = True
            raise
        self._failing = False


def _line_of(entry: _Entry) -> LogLine:
    call, record = entry.call, entry.record
    facts, prompt, first = call.facts, record.prompt, record.first_token
    assert prompt is not None
    return LogLine(
        timestamp=round(record.started_at * 1000.0, 3),
        input_length=prompt.total,
        output_length=record.output_tokens,
        hash_ids=_hex(call.prompt.block_hashes if call.prompt else ()),
        block_size=call.block_size,
        session_id=keyed(facts.session, call.salt, b"session"),
        prefix=keyed(facts.prefix, call.salt, b"prefix"),
        turn=facts.turn,
        stop=call.stop.value,
        tenant=record.tenant,
        model=record.model,
        api_time=round(record.duration_s, 6),
        ttft_ms=round(first.ttft_s * 1000.0, 3) if first is not None else None,
        cached_tokens=prompt.delivered if call.usage is not None else None,
    )


def _hex(hashes: Sequence[BlockHash]) -> list[str]:
    return [block_hash[:_HASH_BYTES].hex() for block_hash in hashes]


def keyed(text: str, salt: str, kind: bytes) -> str | None:
    """A name in 16 hex characters, which only who has the salt can guess; None for no name."""
    if not text:
        return None
    key = hashlib.sha256(salt.encode()).digest()
    return hashlib.blake2b(text.encode(), key=key, person=kind, digest_size=_HASH_BYTES).hexdigest()

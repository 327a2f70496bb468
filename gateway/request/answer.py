"""What the engine's answers say about tokens and times, and what of them the client gets."""

from __future__ import annotations

from typing import Any

import msgspec


class PromptTokensDetails(msgspec.Struct):
    """With --enable-prompt-tokens-details."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """OpenAI's usage object, as far as it is read."""

    prompt_tokens: int = 0
    completion_tokens: int | None = None
    prompt_tokens_details: PromptTokensDetails | None = None

    @property
    def cached_tokens(self) -> int | None:
        """Tokens that the engine did not compute; None when it does not say."""
        details = self.prompt_tokens_details
        return None if details is None else details.cached_tokens


class EngineMetrics(msgspec.Struct):
    """vLLM's field `metrics` (--enable-per-request-metrics). In a stream it rides on the usage
    chunk; with n > 1 it is left out."""

    queue_time_ms: float | None = None
    """From the request's arrival in the engine to its first scheduling."""
    time_to_first_token_ms: float | None = None
    """From its scheduling to the first token."""


class AnswerChoice(msgspec.Struct):
    """One of the answers to a prompt."""

    finish_reason: str | None = None


class Answer(msgspec.Struct):
    """A whole answer, as far as it is read."""

    choices: list[AnswerChoice] = []
    usage: Usage | None = None
    metrics: EngineMetrics | None = None

    @property
    def finish_reason(self) -> str | None:
        """Of the first choice."""
        return self.choices[0].finish_reason if self.choices else None


class Choice(msgspec.Struct):
    """A choice of a chunk of a stream: chat has `delta`, completions have `text`."""

    delta: dict[str, msgspec.Raw] | None = None
    finish_reason: str | None = None

    @property
    def has_token(self) -> bool:
        """False for the chunk that only says the role."""
        if self.delta is None or "role" not in self.delta:
            return True
        return any(
            bytes(value) not in _NOTHING for key, value in self.delta.items() if key != "role"
        )


class Chunk(msgspec.Struct):
    """A chunk of a stream, as far as it is read."""

    choices: list[Choice] = []
    usage: Usage | None = None
    metrics: EngineMetrics | None = None
    error: Any = None


_NOTHING = (b'""', b"null", b"[]", b"{}")
_answers = msgspec.json.Decoder(Answer)
_chunks = msgspec.json.Decoder(Chunk)
_members = msgspec.json.Decoder(dict[str, msgspec.Raw])


def read_answer(body: bytes) -> Answer:
    """Tokens and times of a whole answer; empty when they cannot be read."""
    try:
        return _answers.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return Answer()


def read_chunk(data: bytes) -> Chunk | None:
    """A chunk of a stream; None when it is not one."""
    try:
        return _chunks.decode(data)
    except (msgspec.DecodeError, RecursionError):
        return None


def without_metrics(body: bytes) -> bytes:
    """The JSON object without its member `metrics`; the other values byte for byte."""
    if b'"metrics"' not in body:
        return body
    members = _members.decode(body)
    if members.pop("metrics", None) is None:
        return body
    return msgspec.json.encode(members)

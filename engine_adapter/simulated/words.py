"""Prompts and answers of a simulated engine (engine_adapter.simulated) without a tokenizer.

One word is one token: the hash of its letters. A chat is, for each message, a token for its role,
its words and a token for its end; then the token for the assistant's role. Token n of an answer
reads " t<n>", and that word is token n again, so an answer that a client sends back in its next
request continues the prefix. Whitespace does not count.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import msgspec
import numpy as np
import xxhash

from engine_adapter.base import RenderingError
from prefix_store.hashing import TokenIds, as_token_ids

FIRST_ID = 1_000
NUM_IDS = 90_000
END_OF_MESSAGE = 1
MAX_TOKEN_ID = 2**31 - 1


class Words(Protocol):
    """Bodies to token ids, and token ids to text."""

    async def chat(self, body: Mapping[str, Any]) -> TokenIds:
        """The prompt of a chat body. Raises RenderingError."""

    async def completion(self, prompt: str | list[int]) -> TokenIds:
        """The prompt of a completion. Raises RenderingError."""

    def text(self, token_ids: TokenIds) -> str:
        """What the tokens read."""

    @property
    def answer_ids(self) -> range:
        """Token ids that answers are made of."""

    def close(self) -> None:
        """Give back what it holds."""


class HashedWords:
    """The rule above."""

    answer_ids = range(FIRST_ID, FIRST_ID + NUM_IDS)

    async def chat(self, body: Mapping[str, Any]) -> TokenIds:
        ids: list[int] = []
        if tools := body.get("tools"):
            ids += _message_ids("tools", msgspec.json.encode(tools).decode())
        for message in body["messages"]:
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise RenderingError("a message needs a role")
            ids += _message_ids(message["role"], _content(message))
        ids.append(_hashed("<assistant>"))
        return as_token_ids(ids)

    async def completion(self, prompt: str | list[int]) -> TokenIds:
        if isinstance(prompt, str):
            return as_token_ids([_word_id(word) for word in prompt.split()])
        try:
            token_ids = as_token_ids(prompt)
        except (OverflowError, TypeError, ValueError):
            raise RenderingError("prompt must be text or token ids") from None
        if token_ids.size and token_ids.min() < 0:
            raise RenderingError("a token id is out of range")
        return token_ids

    def text(self, token_ids: TokenIds) -> str:
        return "".join(f" t{token}" for token in token_ids.tolist())

    def close(self) -> None:
        """Nothing is held."""


def answer_to(prompt: TokenIds, count: int, seed: int, ids: range) -> TokenIds:
    """`count` token ids that depend on the prompt and the seed only."""
    first = xxhash.xxh3_64_intdigest(prompt.tobytes(), seed=seed % 2**64) >> 16
    steps = np.arange(count, dtype=np.int64) * 7919
    return as_token_ids(((first + steps) % len(ids) + ids.start).astype(np.int32))


def _message_ids(role: str, content: str) -> list[int]:
    return [_hashed(f"<{role}>"), *map(_word_id, content.split()), END_OF_MESSAGE]


def _content(message: dict[str, Any]) -> str:
    content = message.get("content")
    parts: list[str] = []
    if isinstance(content, str):
        parts.append(content)
    elif isinstance(content, list):
        parts += [str(part.get("text", "")) for part in content if isinstance(part, dict)]
    if calls := message.get("tool_calls"):
        parts.append(msgspec.json.encode(calls).decode())
    return " ".join(parts)


def _word_id(word: str) -> int:
    if word[0] == "t" and word[1:].isdecimal() and len(word) < 9:
        number = int(word[1:])
        if number in HashedWords.answer_ids:
            return number
    return _hashed(word)


def _hashed(word: str) -> int:
    return FIRST_ID + xxhash.xxh3_64_intdigest(word.encode("utf-8", "surrogatepass")) % NUM_IDS

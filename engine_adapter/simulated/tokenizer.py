"""Prompts of a simulated engine (engine_adapter.simulated) with the tokenizer of a real model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from engine_adapter.rendering import PromptRenderer
from engine_adapter.rendering_export import export_tokenizer
from prefix_store.hashing import TokenIds, routing_root

MEMO_BYTES = 64 * 1024**2
_FIRST_ANSWER_ID = 300
"""Behind the special tokens and single bytes of usual vocabularies."""


class TokenizedWords:
    """Rendered as vLLM renders them, and answers of tokens that have text."""

    def __init__(self, renderer: PromptRenderer, tokenizer: Tokenizer) -> None:
        self._renderer = renderer
        self._tokenizer = tokenizer
        self._root = routing_root("simulated", "")
        self.answer_ids = range(_FIRST_ANSWER_ID, tokenizer.get_vocab_size(with_added_tokens=False))

    @classmethod
    def load(cls, model_dir: Path, *, block_size: int) -> TokenizedWords:
        """Loads tokenizer and template from `model_dir` (about 2 s). Raises RenderingError."""
        exported = export_tokenizer(model_dir)
        renderer = PromptRenderer(exported, block_size=block_size, memo_bytes=MEMO_BYTES)
        return cls(renderer, Tokenizer.from_str(exported.backend))

    async def chat(self, body: Mapping[str, Any]) -> TokenIds:
        return (await self._renderer.chat(body, self._root)).token_ids

    async def completion(self, prompt: str | list[int]) -> TokenIds:
        return (await self._renderer.completion({"prompt": prompt}, self._root)).token_ids

    def text(self, token_ids: TokenIds) -> str:
        text: str = self._tokenizer.decode(token_ids.tolist(), skip_special_tokens=True)
        return text

    def close(self) -> None:
        self._renderer.close()

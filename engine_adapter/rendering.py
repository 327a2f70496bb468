"""From an OpenAI request body to exactly the engine's token ids and their chain of block hashes.

    body -> rendering_request, rendering_messages -> chat_template -> text
    text -> prefix_memo (what is known) + rendering_tokenizer (what is new) -> Prompt

What was done for a seen prefix is not done again. Tokenizing more than a little runs in threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_adapter.base import Prompt, RenderingError
from engine_adapter.chat_template import ChatTemplate
from engine_adapter.prefix_memo import MemoKey, PrefixMemo
from engine_adapter.rendering_export import ExportedTokenizer, export_tokenizer
from engine_adapter.rendering_request import (
    adds_special_tokens,
    chat_input,
    completion_prompt,
    tools_of,
)
from engine_adapter.rendering_tokenizer import PromptTokenizer
from prefix_store.base import BlockHash
from prefix_store.hashing import TokenIds, as_token_ids, extend_chain

INLINE_CHARS = 2048
"""New text up to this size is tokenized on the event loop (about 0.3 ms); a thread costs more."""
INLINE_ITEMS = 1000
"""Chats with more messages and tools than this are rendered in a thread (about 3 us each)."""
PIECES_AT_A_TIME = 16
"""So many new pieces are hashed at once (up to about 1 ms); then others have their turn."""
NUM_THREADS = 2
MAX_TOKEN_ID = 2**31 - 1


@dataclass(frozen=True, slots=True)
class RendererStats:
    """Counters since the start, and what the memo holds now."""

    prompts: int
    tokens_from_memo: int
    """Prompt tokens that were known, with the hashes of their blocks."""
    tokens_tokenized: int
    """Prompt tokens that had to be made (or waited for, when another prompt just made them)."""
    memo_bytes: int
    memo_entries: int
    offloaded: int
    """Prompts for which a thread tokenized something."""


@dataclass(frozen=True, slots=True)
class _Job:
    """A batch of pieces that is being tokenized in a thread."""

    result: asyncio.Future[list[TokenIds]]
    index: int
    """Place of the piece in the batch."""


class PromptRenderer:
    """Renders the prompts of one model. Use it from one event loop; close it at the end."""

    def __init__(self, exported: ExportedTokenizer, *, block_size: int, memo_bytes: int) -> None:
        self._templates = {
            name: ChatTemplate(source, exported.special_tokens)
            for name, source in exported.chat_templates.items()
        }
        self._tokenizer = PromptTokenizer.from_backend(exported.backend)
        self._block_size = block_size
        self._memo = PrefixMemo(self._tokenizer.splitter, block_size, memo_bytes)
        self._no_tokens = as_token_ids([])
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="render")
        self._jobs: dict[tuple[MemoKey, str], _Job] = {}
        self._prompts = self._tokens_from_memo = self._tokens_tokenized = self._offloaded = 0

    @classmethod
    def load(cls, model_dir: Path, *, block_size: int, memo_bytes: int) -> PromptRenderer:
        """Loads tokenizer and chat template from `model_dir`, never from the network (about 2 s).

        `memo_bytes` bounds what is remembered of seen prompts. Raises RenderingError when the
        model's prompts cannot be rendered here exactly.
        """
        return cls(export_tokenizer(model_dir), block_size=block_size, memo_bytes=memo_bytes)

    async def chat(self, body: Mapping[str, Any], root: BlockHash) -> Prompt:
        """The prompt of a decoded /v1/chat/completions body. Raises RenderingError."""
        messages, tools = body.get("messages"), body.get("tools")
        num_items = sum(len(items) for items in (messages, tools) if isinstance(items, list))
        if num_items > INLINE_ITEMS:
            loop = asyncio.get_running_loop()
            text = await loop.run_in_executor(self._threads, self._chat_text, body)
        else:
            text = self._chat_text(body)
        return await self._text(text, root, adds_special_tokens(body, default=False))

    async def completion(self, body: Mapping[str, Any], root: BlockHash) -> Prompt:
        """The prompt of a decoded /v1/completions body. Raises RenderingError."""
        prompt = completion_prompt(body)
        if isinstance(prompt, str):
            return await self._text(prompt, root, adds_special_tokens(body, default=True))
        if not 0 <= min(prompt) <= max(prompt) <= MAX_TOKEN_ID:
            raise RenderingError("a token id is out of range")
        return self._tokens(as_token_ids(prompt), root)

    def stats(self) -> RendererStats:
        """What was done so far."""
        return RendererStats(
            prompts=self._prompts,
            tokens_from_memo=self._tokens_from_memo,
            tokens_tokenized=self._tokens_tokenized,
            memo_bytes=self._memo.used_bytes,
            memo_entries=len(self._memo),
            offloaded=self._offloaded,
        )

    def close(self) -> None:
        """Ends the threads; what they are at is finished but no longer waited for."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _chat_text(self, body: Mapping[str, Any]) -> str:
        tools = tools_of(body)
        template = self._templates.get("tool_use") if tools is not None else None
        template = template or self._templates.get("default")
        if template is None:
            raise RenderingError("the model has no chat template")
        return template.render(chat_input(body, template, tools))

    async def _text(self, text: str, root: BlockHash, special_tokens: bool) -> Prompt:
        before = self._tokenizer.added_before if special_tokens else self._no_tokens
        if before is None:
            return await self._whole_text(text, root)
        key = MemoKey(root, special_tokens)
        memo = self._memo
        known = memo.match(key, before, text)
        node = known.node
        pieces = list(self._tokenizer.splitter.split(text, known.end))
        tokens = await self._tokenize(key, pieces) if pieces else ()
        for i, (piece, token_ids) in enumerate(zip(pieces, tokens, strict=True), start=1):
            node = memo.extend(key, node, piece, token_ids)
            if i % PIECES_AT_A_TIME == 0:
                memo.touch(node)
                await asyncio.sleep(0)
        prompt = memo.prompt(node)
        memo.settle(node)
        self._count(prompt, known.node.num_tokens)
        return prompt

    async def _tokenize(self, key: MemoKey, pieces: list[str]) -> list[TokenIds]:
        """Token ids of each piece; equal pieces of concurrent prompts of one root are done once."""
        found: dict[str, TokenIds] = {}
        waiting: dict[str, _Job] = {}
        missing: list[str] = []
        for piece in dict.fromkeys(pieces):
            if (short := self._memo.short_piece(key, piece)) is not None:
                found[piece] = short
            elif job := self._jobs.get((key, piece)):
                waiting[piece] = job
            else:
                missing.append(piece)
        if sum(map(len, missing)) <= INLINE_CHARS:
            found.update(zip(missing, self._tokenizer.encode(missing), strict=True))
        else:
            waiting |= self._start_job(key, missing)
            self._offloaded += 1
        for piece, job in waiting.items():
            found[piece] = (await asyncio.shield(job.result))[job.index]
        return [found[piece] for piece in pieces]

    def _start_job(self, key: MemoKey, pieces: list[str]) -> dict[str, _Job]:
        loop = asyncio.get_running_loop()
        result = loop.run_in_executor(self._threads, self._tokenizer.encode, pieces)
        jobs = {piece: _Job(result, index) for index, piece in enumerate(pieces)}
        for piece, job in jobs.items():
            self._jobs[key, piece] = job

        def forget(finished: asyncio.Future[list[TokenIds]]) -> None:
            for piece in pieces:
                del self._jobs[key, piece]
            if not finished.cancelled():
                finished.exception()  # whoever still waits gets it; nobody has to

        result.add_done_callback(forget)
        return jobs

    async def _whole_text(self, text: str, root: BlockHash) -> Prompt:
        """For tokenizers whose special tokens depend on the text: nothing is remembered."""
        loop = asyncio.get_running_loop()
        self._offloaded += 1
        encode = self._tokenizer.encode_with_special_tokens
        return self._tokens(await loop.run_in_executor(self._threads, encode, text), root)

    def _tokens(self, token_ids: TokenIds, root: BlockHash) -> Prompt:
        hashes = extend_chain(root, token_ids, self._block_size)
        prompt = Prompt(num_tokens=token_ids.size, block_hashes=hashes, pieces=[token_ids])
        self._count(prompt, known_tokens=0)
        return prompt

    def _count(self, prompt: Prompt, known_tokens: int) -> None:
        self._prompts += 1
        self._tokens_from_memo += known_tokens
        self._tokens_tokenized += prompt.num_tokens - known_tokens

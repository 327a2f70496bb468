"""Answers of a simulated engine (engine_adapter.simulated), in the shapes of vLLM 0.32."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import Any

import msgspec

from engine_adapter.simulated.request import EngineRequest
from engine_adapter.simulated.sequence import Sequence
from engine_adapter.simulated.words import Words

FINGERPRINT = "vllm-0.32.0-simulated"
DONE = b"data: [DONE]\n\n"

Json = dict[str, Any]


class AnswerWriter:
    """Writes the answers to one request."""

    def __init__(
        self,
        request: EngineRequest,
        words: Words,
        *,
        speed: float,
        block_size: int,
        stops_by_itself: bool,
        request_id: str | None,
    ) -> None:
        """`speed`: seconds of the simulated clock in a real second."""
        self._request = request
        self._words = words
        self._speed = speed
        self._shown: dict[int, int] = {}
        """Tokens of each answer that were handed out."""
        self._block_size = block_size
        self._end = "stop" if stops_by_itself else "length"
        prefix = "chatcmpl" if request.is_chat else "cmpl"
        self._head: Json = {
            "id": f"{prefix}-{request_id or uuid.uuid4().hex[:16]}",
            "object": "chat.completion" if request.is_chat else "text_completion",
            "created": int(time.time()),
            "model": request.model,
        }

    def whole(self, sequences: list[Sequence]) -> bytes:
        """The body of an answer that is not streamed."""
        choices = [self._whole_choice(i, sequence) for i, sequence in enumerate(sequences)]
        metrics = self._metrics(sequences)
        if metrics is not None:
            metrics["speculative_decoding"] = None
        answer: Json = {
            **self._head,
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": FINGERPRINT,
            "usage": {
                **self._usage(sequences),
                "prompt_tokens_details": {
                    "cached_tokens": _cached(sequences),
                    "created_cache_tokens": self._created(sequences),
                    "multimodal_tokens": None,
                },
                "completion_tokens_details": None,
            },
        }
        if self._request.is_chat:
            ids = self._prompt_ids(sequences[0])
            answer |= {"prompt_logprobs": None, "prompt_token_ids": ids, "prompt_text": None}
        answer |= {"kv_transfer_params": None, "ec_transfer_params": None, "metrics": metrics}
        return msgspec.json.encode(answer)

    def news(self, sequences: list[Sequence]) -> bytes:
        """The events of a stream that were not handed out yet."""
        events = bytearray()
        for index, sequence in enumerate(sequences):
            first, end = self._shown.get(index, 0), sequence.wire_tokens
            if first == end:
                continue
            if first == 0 and self._request.is_chat:
                events += self._role(index, sequence)
            events += self._tokens(index, sequence, first, end)
            self._shown[index] = end
        if all(sequence.is_finished for sequence in sequences):
            events += self._last(sequences)
        return bytes(events)

    def _role(self, index: int, sequence: Sequence) -> bytes:
        """The first event of a chat: who speaks, and no token."""
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        ids = self._prompt_ids(sequence)
        return self._event(
            {"choices": [choice], "prompt_token_ids": ids, "prompt_text": None}, [sequence], 0
        )

    def _tokens(self, index: int, sequence: Sequence, first: int, end: int) -> bytes:
        """Tokens [first, end) of an answer."""
        ids = sequence.job.answer[first:end]
        text = self._words.text(ids)
        shown = ids.tolist() if self._request.returns_token_ids else None
        last = sequence.is_finished and end == sequence.job.answer.size
        choice: Json = {"index": index}
        if self._request.is_chat:
            choice["delta"] = {"content": text}
        else:
            choice["text"] = text
        choice |= {"logprobs": None, "finish_reason": self._end if last else None}
        if last or not self._request.is_chat:
            choice["stop_reason"] = None
        if not self._request.is_chat:
            choice["prompt_token_ids"] = self._prompt_ids(sequence) if first == 0 else None
        choice["token_ids"] = shown
        more: Json = {"choices": [choice]}
        if last and not self._request.include_usage:
            more["system_fingerprint"] = FINGERPRINT
        return self._event(more, [sequence], end)

    def _last(self, sequences: list[Sequence]) -> bytes:
        """The last events: usage where it is asked for, and [DONE]."""
        if not self._request.include_usage:
            return DONE
        details: Json = {"cached_tokens": _cached(sequences)}
        if (created := self._created(sequences)) is not None:
            details["created_cache_tokens"] = created
        more: Json = {
            "choices": [],
            "usage": {**self._usage(sequences), "prompt_tokens_details": details},
            "system_fingerprint": FINGERPRINT,
        }
        if (metrics := self._metrics(sequences)) is not None:
            more["metrics"] = metrics
        return self._event(more, sequences, None) + DONE

    def _event(self, more: Json, sequences: list[Sequence], generated: int | None) -> bytes:
        event = {**self._head, **more}
        if self._request.is_chat:
            event["object"] = "chat.completion.chunk"
        if self._request.continuous_usage and generated is not None:
            prompt = sequences[0].job.prompt.size
            event["usage"] = {
                "prompt_tokens": prompt,
                "total_tokens": prompt + generated,
                "completion_tokens": generated,
                "completion_tokens_details": None,
            }
        return b"data: " + msgspec.json.encode(event) + b"\n\n"

    def _whole_choice(self, index: int, sequence: Sequence) -> Json:
        ids = sequence.job.answer
        text = self._words.text(ids)
        choice: Json = {"index": index}
        if self._request.is_chat:
            choice["message"] = {
                "role": "assistant",
                "content": text,
                "refusal": None,
                "annotations": None,
                "audio": None,
                "function_call": None,
                "reasoning": None,
            }
        else:
            choice["text"] = text
        choice |= {
            "logprobs": None,
            "finish_reason": self._end,
            "stop_reason": None,
            "token_ids": ids.tolist() if self._request.returns_token_ids else None,
        }
        if not self._request.is_chat:
            choice |= {"prompt_logprobs": None, "prompt_token_ids": self._prompt_ids(sequence)}
        choice["routed_experts"] = None
        return choice

    def _prompt_ids(self, sequence: Sequence) -> list[int] | None:
        return sequence.job.prompt.tolist() if self._request.returns_token_ids else None

    def _usage(self, sequences: list[Sequence]) -> dict[str, int]:
        prompt = sum(sequence.job.prompt.size for sequence in self._originals(sequences))
        generated = sum(sequence.job.answer.size for sequence in sequences)
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + generated,
            "completion_tokens": generated,
        }

    def _originals(self, sequences: list[Sequence]) -> Iterator[Sequence]:
        """One sequence of each prompt."""
        yield from sequences[:: self._request.copies]

    def _created(self, sequences: list[Sequence]) -> int | None:
        """Prompt tokens that others can reuse from now on; only chat says it."""
        if not self._request.is_chat:
            return None
        size = sequences[0].job.prompt.size
        return size // self._block_size * self._block_size - _cached(sequences)

    def _metrics(self, sequences: list[Sequence]) -> dict[str, float | None] | None:
        """Times in milliseconds of the real clock, as a client could measure them."""
        if len(sequences) != 1:
            return None
        one = sequences[0]
        assert one.scheduled_at is not None
        assert one.first_token_at is not None
        assert one.finished_at is not None
        scale = 1000.0 / self._speed
        generation = (one.finished_at - one.first_token_at) * scale
        first = (one.first_token_at - one.scheduled_at) * scale
        count = one.job.answer.size
        return {
            "time_to_first_token_ms": first,
            "generation_time_ms": generation,
            "queue_time_ms": (one.scheduled_at - one.arrived_at) * scale,
            "mean_itl_ms": generation / (count - 1) if count > 1 else None,
            "tokens_per_second": 1000.0 * count / (first + generation),
        }


def _cached(sequences: list[Sequence]) -> int:
    """As vLLM says it: of the last prompt."""
    return sequences[-1].cached_tokens or 0

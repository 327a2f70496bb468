"""One streamed request of the demo, and what the gateway says of it afterwards."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

from gateway.accounts.stats_schema import WindowStats
from gateway.cli.stats import fetch
from gateway.local.local_http import HttpError, request, stream_lines
from gateway.settings.user_error import UserError

ANSWER_TOKENS = 32
ACCOUNTED_WITHIN_S = 10.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What the client saw."""

    text: str
    ttft_s: float
    """From sending the request to the first token."""
    prompt_tokens: int
    """As the engine reports it in `usage`."""
    cached_tokens: int
    """Likewise: reused, wherever it came from."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One line of the table: the answer, and the difference that it made in /cache/stats."""

    label: str
    answer: Answer
    from_device: int
    from_memory: int
    saved_s: float | None
    """None: nothing was reused, or the gateway has no measured curve for it."""


def ask(gateway_url: str, model: str, messages: list[dict[str, Any]]) -> Answer:
    """Send the conversation and read the stream. Raises HttpError."""
    body = {
        "model": model,
        "messages": messages,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "max_tokens": ANSWER_TOKENS,
    }
    started = time.perf_counter()
    first_token: float | None = None
    text = ""
    usage: dict[str, Any] = {}
    for line in stream_lines(f"{gateway_url}/v1/chat/completions", body):
        data = line.removeprefix("data: ")
        if data in (line, "[DONE]"):
            continue
        chunk = json.loads(data)
        if "error" in chunk:
            raise HttpError(f"the answer broke off: {chunk['error'].get('message')}")
        for choice in chunk.get("choices", []):
            piece = choice["delta"].get("content") or ""
            if piece and first_token is None:
                first_token = time.perf_counter()
            text += piece
        usage = chunk.get("usage") or usage
    if first_token is None or not usage:
        raise HttpError(f"{gateway_url} answered without a token or without usage")
    details = usage.get("prompt_tokens_details") or {}
    return Answer(
        text=text.strip(),
        ttft_s=first_token - started,
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=details.get("cached_tokens") or 0,
    )


def measure(gateway_url: str, model: str, label: str, messages: list[dict[str, Any]]) -> Measured:
    """Ask, and wait until the gateway has accounted for it. Nobody else may use the gateway."""
    before = _totals(gateway_url)
    answer = ask(gateway_url, model, messages)
    deadline = time.monotonic() + ACCOUNTED_WITHIN_S
    while (after := _totals(gateway_url)).requests.total == before.requests.total:
        if time.monotonic() > deadline:
            raise UserError(f"{gateway_url}/cache/stats does not count the request")
        time.sleep(0.02)
    old, new = before.prompt_tokens.delivered, after.prompt_tokens.delivered
    saved = None
    if after.prefill_saved.measured_requests > before.prefill_saved.measured_requests:
        saved = (after.prefill_saved.net_s or 0.0) - (before.prefill_saved.net_s or 0.0)
    return Measured(label, answer, new.device - old.device, new.memory - old.memory, saved)


def _totals(gateway_url: str) -> WindowStats:
    return fetch(gateway_url).total.windows.since_start


def full_block_tokens(engine_url: str, model: str, system: str, block_size: int) -> int:
    """Tokens in full blocks of a prompt that begins with this system message, from the engine."""
    body = {
        "model": model,
        "messages": [{"role": "system", "content": system}],
        "add_generation_prompt": False,
    }
    count = int(request(f"{engine_url}/tokenize", body, timeout_s=60.0).json()["count"])
    return count // block_size * block_size

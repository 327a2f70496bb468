"""The unmodified OpenAI SDK against the gateway in front of a real engine."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

pytestmark = pytest.mark.engine

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
def client(stack: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{stack.gateway_url}/v1", api_key="none", max_retries=0, timeout=120
    ) as client:
        yield client


def long_system(words: str, count: int = 400) -> list[dict[str, str]]:
    """A conversation with a system prompt that no other test uses."""
    text = " ".join(f"{words} {i}." for i in range(count))
    return [{"role": "system", "content": text}, *QUESTION]


def until(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether it came true within so long."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def stats(stack: Any) -> dict[str, Any]:
    with urllib.request.urlopen(f"{stack.gateway_url}/cache/stats") as response:
        page: dict[str, Any] = json.load(response)
    return page


def running(stack: Any) -> float:
    """Requests that the engine works on."""
    count: float = stack.metric("vllm:num_requests_running")
    return count


def window(stack: Any) -> dict[str, Any]:
    since_start: dict[str, Any] = stats(stack)["total"]["windows"]["since_start"]
    return since_start


def test_whole_answer(stack, client):
    """The model answers, usage is there, headers say what happened."""
    raw = client.chat.completions.with_raw_response.create(
        model=stack.model, messages=QUESTION, max_tokens=12, temperature=0
    )
    answer = raw.parse()
    assert answer.choices[0].message.content
    assert answer.usage.prompt_tokens > 0
    assert 0 < answer.usage.completion_tokens <= 12
    assert raw.headers["x-headstart-replica"] == "engine-0"
    details = answer.usage.prompt_tokens_details
    assert raw.headers["x-headstart-cached-tokens"] == str(details.cached_tokens)
    assert answer._request_id == raw.headers["x-request-id"]
    assert "metrics" not in answer.model_extra


def test_stream_gives_the_same_text(stack, client):
    """Chunk by chunk; no usage chunk, since it was not asked for."""
    whole = client.chat.completions.create(
        model=stack.model, messages=QUESTION, max_tokens=12, temperature=0
    )
    chunks = list(
        client.chat.completions.create(
            model=stack.model, messages=QUESTION, max_tokens=12, temperature=0, stream=True
        )
    )
    assert all(chunk.choices for chunk in chunks)
    assert all(chunk.usage is None for chunk in chunks)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content


def test_usage_chunk_for_who_asks(stack, client):
    """The last chunk, without choices and without the engine's metrics."""
    chunks = list(
        client.chat.completions.create(
            model=stack.model,
            messages=QUESTION,
            max_tokens=4,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 4
    assert "metrics" not in chunks[-1].model_extra


def test_continuous_usage_is_only_for_who_asks(stack, client):
    """The option without include_usage does nothing, as on the engine itself."""
    chunks = client.chat.completions.create(
        model=stack.model,
        messages=QUESTION,
        max_tokens=4,
        stream=True,
        stream_options={"continuous_usage_stats": True},
    )
    assert all(chunk.usage is None for chunk in chunks)


def test_completions(stack, client):
    """The older API, whole and as a stream."""
    arguments = {
        "model": stack.model,
        "prompt": "The capital of France is",
        "max_tokens": 5,
        "temperature": 0,
    }
    whole = client.completions.create(**arguments)
    stream = client.completions.create(**arguments, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text


def test_several_answers_and_several_prompts(stack, client):
    """What cannot be predicted is forwarded all the same."""
    answer = client.chat.completions.create(model=stack.model, messages=QUESTION, max_tokens=3, n=2)
    assert len(answer.choices) == 2
    answers = client.completions.create(model=stack.model, prompt=["a b c", "d e f"], max_tokens=2)
    assert len(answers.choices) == 2


def test_models(stack, client):
    """The engine's list."""
    assert [model.id for model in client.models.list()] == [stack.model]


def test_unknown_model(stack, client):
    """OpenAI's own code."""
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="nobody", messages=QUESTION)
    assert caught.value.code == "model_not_found"
    assert caught.value.request_id


def test_prompt_over_the_context_length(stack, client):
    """The engine's own message, in the envelope."""
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=stack.model, messages=long_system("too long", 9000))
    assert "context length" in caught.value.body["message"]
    assert caught.value.request_id


def test_what_the_engine_refuses(stack, client):
    """Fields that we do not read are the engine's to judge."""
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=stack.model, messages=QUESTION, temperature=-5)
    assert "temperature" in caught.value.body["message"]


def test_what_only_the_template_refuses(stack, client):
    """A role that no template knows, or none at all: an answer or a 4xx, never a 5xx."""
    for message in ({"role": "nobody", "content": "x"}, {"content": "x"}, {"role": "user"}):
        response = httpx.post(
            f"{stack.gateway_url}/v1/chat/completions",
            json={"model": stack.model, "messages": [message], "max_tokens": 1},
            timeout=60,
        )
        assert response.status_code < 500


def test_prompts_are_rendered_exactly(stack, client):
    """Every prompt of this conversation had the length that we predicted."""
    before = window(stack)["rendering_mismatches"]
    messages = long_system("exactly rendered", 50)
    for text in ("Hello", "naïve café 🚀", ""):
        messages = [*messages, {"role": "assistant", "content": "Yes."}]
        messages = [*messages, {"role": "user", "content": text}]
        client.chat.completions.create(model=stack.model, messages=messages, max_tokens=2)
    assert window(stack)["rendering_mismatches"] == before


def test_reuse_is_predicted_and_delivered(stack, client):
    """The second request is captured by the index and delivered by the engine: the same tokens."""
    messages = long_system("predicted reuse", 100)
    arguments = {"model": stack.model, "messages": messages, "max_tokens": 2, "temperature": 0}
    with client.chat.completions.with_streaming_response.create(**arguments, stream=True) as first:
        first.read()
        assert first.headers["x-headstart-predicted-tokens"] == "0"
    with client.chat.completions.with_streaming_response.create(**arguments, stream=True) as again:
        again.read()
        predicted = int(again.headers["x-headstart-predicted-tokens"])
    whole = client.chat.completions.create(**arguments)
    assert predicted > 500
    assert whole.usage.prompt_tokens_details.cached_tokens == predicted


def test_reuse_from_the_store_is_told_apart(stack, client):
    """The engine's own cache is emptied: the store delivers, and the statistics say so."""
    messages = long_system("store reuse", 100)
    arguments = {"model": stack.model, "messages": messages, "max_tokens": 2, "temperature": 0}
    first = client.chat.completions.create(**arguments)
    with stack.store() as store:
        assert until(lambda: store.stats().reserved_bytes == 0, 10)
    stack.forget_device()
    before = window(stack)["prompt_tokens"]["delivered"]
    again = client.chat.completions.create(**arguments)
    assert again.choices[0].message.content == first.choices[0].message.content
    cached = again.usage.prompt_tokens_details.cached_tokens
    assert cached == (again.usage.prompt_tokens - 1) // 32 * 32

    def memory() -> int:
        return window(stack)["prompt_tokens"]["delivered"]["memory"] - before["memory"]

    assert until(lambda: memory() == cached, 5), (memory(), cached)


def test_leaving_a_stream_aborts_the_engines_work(stack, client):
    """The SDK's close is enough."""
    stream = client.chat.completions.create(
        model=stack.model,
        messages=QUESTION,
        max_tokens=3000,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    for count, _ in enumerate(stream):
        if count == 3:
            break
    assert running(stack) == 1
    stream.close()
    assert until(lambda: running(stack) == 0, 5)
    assert until(lambda: stats(stack)["in_flight"] == 0, 5)


async def test_leaving_before_the_first_token_aborts_the_engines_work(stack):
    """In the middle of a long prefill, streaming or not."""
    async with openai.AsyncOpenAI(
        base_url=f"{stack.gateway_url}/v1", api_key="none", max_retries=0
    ) as client:
        for stream in (False, True):
            messages = long_system(f"left early, stream {stream}", 700)
            request = asyncio.create_task(
                client.chat.completions.create(
                    model=stack.model, messages=messages, max_tokens=3000, stream=stream
                )
            )
            if not stream:
                assert await asyncio.to_thread(until, lambda: running(stack) == 1, 20)
                request.cancel()
            else:
                await (await request).close()
            assert await asyncio.to_thread(until, lambda: running(stack) == 0, 5)
    assert await asyncio.to_thread(until, lambda: stats(stack)["in_flight"] == 0, 5)


def test_concurrent_clients(stack, client):
    """Many at once, on kept connections: every answer belongs to its question."""

    def ask(number: int) -> tuple[int, str]:
        answer = client.chat.completions.create(
            model=stack.model,
            messages=[{"role": "user", "content": f"Repeat the number {number}."}],
            max_tokens=6,
            temperature=0,
            extra_headers={"x-request-id": f"number-{number}"},
        )
        return number, answer._request_id

    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(ask, range(16)))
    assert answers == [(number, f"number-{number}") for number in range(16)]


def test_metrics_page(stack, client):
    """Prometheus text, in step with the statistics."""
    client.chat.completions.create(model=stack.model, messages=QUESTION, max_tokens=1)
    with urllib.request.urlopen(f"{stack.gateway_url}/metrics") as response:
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        text = response.read().decode()
    assert 'headstart_requests_total{outcome="ok",replica="engine-0"}' in text or (
        'headstart_requests_total{replica="engine-0",outcome="ok"}' in text
    )
    assert "headstart_first_token_seconds_bucket" in text


def test_no_traceback_in_the_gateways_log(stack, client):
    """After whatever the tests before this one did; random order makes this one cover others."""
    with pytest.raises(openai.BadRequestError):
        client.post("/chat/completions", body={"model": stack.model}, cast_to=object)
    assert "Traceback" not in stack.log("gateway")

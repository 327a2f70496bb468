"""What is read along in a stream: first token, usage, metrics, errors, the end."""

from __future__ import annotations

import itertools
import json

from hypothesis import given
from hypothesis import strategies as st

from gateway.request.stream_watch import StreamWatch


def watch_of(*, wants_usage: bool = False) -> StreamWatch:
    ticks = itertools.count(1)
    return StreamWatch(wants_usage=wants_usage, clock=lambda: float(next(ticks)))


def test_the_role_chunk_is_no_token(stub_engine):
    """vLLM sends it first; the first token comes with a later chunk."""
    watch = watch_of()
    watch.feed(stub_engine.ROLE)
    assert watch.first_token_at is None
    watch.feed(stub_engine.TOKEN_A)
    assert watch.first_token_at == 1.0
    watch.feed(stub_engine.TOKEN_B)
    assert watch.first_token_at == 1.0


def test_a_role_chunk_with_content_is_a_token(stub_engine):
    """Other engines send both in one."""
    watch = watch_of()
    delta = {"role": "assistant", "content": "Hi"}
    watch.feed(stub_engine.chunk_of([{"index": 0, "delta": delta}]))
    assert watch.first_token_at == 1.0


def test_reasoning_and_tool_calls_are_tokens(stub_engine):
    """The first token need not be content."""
    for delta in ({"reasoning": "hm"}, {"tool_calls": [{"index": 0}]}, {"content": ""}):
        watch = watch_of()
        watch.feed(stub_engine.chunk_of([{"index": 0, "delta": delta}]))
        assert watch.first_token_at == 1.0


def test_completions_have_text(stub_engine):
    """No role chunk there."""
    watch = watch_of()
    watch.feed(stub_engine.chunk_of([{"index": 0, "text": "Hi", "finish_reason": None}]))
    assert watch.first_token_at == 1.0


def test_usage_and_metrics_are_read(stub_engine):
    """From the last chunk, which is dropped."""
    watch = watch_of()
    assert watch.feed(stub_engine.LAST) == b""
    assert watch.usage.prompt_tokens == stub_engine.NUM_TOKENS
    assert watch.usage.cached_tokens == 64
    assert watch.metrics.queue_time_ms == 3.0
    assert watch.metrics.time_to_first_token_ms == 20.0


def test_continuous_usage_passes_untouched(stub_engine):
    """Chunks with choices are the client's; the last usage counts."""
    watch = watch_of(wants_usage=True)
    chunk = stub_engine.chunk_of(
        [{"index": 0, "delta": {"content": "a"}}],
        usage={"prompt_tokens": 5, "completion_tokens": 1, "total_tokens": 6},
    )
    assert watch.feed(chunk) == chunk
    assert watch.usage.completion_tokens == 1
    watch.feed(stub_engine.LAST)
    assert watch.usage.completion_tokens == 2


def test_what_is_not_json_passes(stub_engine):
    """Comments, pings and surprises are not ours to judge."""
    watch = watch_of()
    for odd in (b": ping\n\n", b"data: usage\n\n", b'data: {"usage": \n\n', b'data: ["usage"]\n\n'):
        assert watch.feed(odd) == odd
    assert watch.usage is None


def test_the_end_is_seen(stub_engine):
    """[DONE], also with CR LF."""
    for done in (stub_engine.DONE, b"data: [DONE]\r\n\r\n", b"data:[DONE]\n\n"):
        watch = watch_of()
        assert watch.feed(done) == done
        assert watch.done


CONTENTS = st.lists(
    st.sampled_from(
        ["a", '"usage"', "[DONE]", "data: [DONE]", '"error"', "\n\n", "é", '"choices":[]']
    ),
    max_size=6,
)


@given(CONTENTS, st.lists(st.integers(0, 10_000), max_size=12), st.booleans())
def test_contents_and_splits_change_nothing(contents, cuts, wants_usage):
    """Whatever the model says and however it is cut: the client gets all but what is ours."""
    events = [
        json.dumps({"choices": [{"delta": {"content": content}}]}, separators=(",", ":"))
        for content in contents
    ]
    usage = {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2}}
    last = json.dumps(usage, separators=(",", ":"))
    stream = "".join(f"data: {e}\n\n" for e in [*events, last, "[DONE]"]).encode()
    expected = [*events, last, "[DONE]"] if wants_usage else [*events, "[DONE]"]
    edges = sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in cuts)})
    watch = watch_of(wants_usage=wants_usage)
    got = b"".join(watch.feed(stream[a:b]) for a, b in itertools.pairwise(edges))
    assert got == "".join(f"data: {e}\n\n" for e in expected).encode()
    assert watch.done
    assert not watch.failed
    assert watch.usage.completion_tokens == 2
    assert (watch.first_token_at is not None) == bool(events)


def test_the_reason_to_finish_is_read(stub_engine):
    """Of the choice that ended first; null until then."""
    watch = watch_of()
    watch.feed(stub_engine.TOKEN_A)
    assert watch.finish_reason is None
    for index, reason in enumerate(("tool_calls", "stop")):
        ended = {"index": index, "delta": {"content": ""}, "finish_reason": reason}
        event = stub_engine.chunk_of([ended])
        assert watch.feed(event) == event
    assert watch.finish_reason == "tool_calls"


def test_a_reason_with_a_space_before_it_is_read_too(stub_engine):
    """As other engines than vLLM write JSON."""
    watch = watch_of()
    watch.feed(stub_engine.TOKEN_A)
    watch.feed(b'data: {"choices": [{"text": "", "finish_reason": "length"}]}\n\n')
    assert watch.finish_reason == "length"

"""The body is split, checked and put together again without touching what is the client's."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.request.body import Api, CompletionBody, split_object
from gateway.web.errors import BadRequestError

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)
SPACE = st.sampled_from(["", " ", "\n\t", "\r\n "])
KEYS = st.text(max_size=4) | st.sampled_from(['"', "\\", "a", "é", "\\u0061"])


@st.composite
def objects(draw: st.DrawFn) -> tuple[list[str], bytes]:
    """The keys of an object, perhaps with duplicates, and its text with odd white space."""
    members = draw(st.lists(st.tuples(KEYS, JSON), max_size=5))
    ascii_only = draw(st.booleans())
    text = draw(SPACE) + "{"
    for i, (key, value) in enumerate(members):
        text += "," if i else ""
        text += draw(SPACE) + json.dumps(key, ensure_ascii=ascii_only) + draw(SPACE) + ":"
        text += draw(SPACE) + json.dumps(value, ensure_ascii=ascii_only) + draw(SPACE)
    raw = (text + "}" + draw(SPACE)).encode("utf-8", "replace")
    return [key for key, _ in members], raw


@given(objects())
def test_duplicate_keys_are_refused_and_nothing_else(case):
    """Whatever the white space, the escapes and the values look like."""
    keys, raw = case
    if len(set(keys)) == len(keys):
        fields = split_object(raw)
        assert list(fields) == keys
        assert {k: json.loads(bytes(v)) for k, v in fields.items()} == json.loads(raw)
    else:
        with pytest.raises(BadRequestError, match="twice"):
            split_object(raw)


@pytest.mark.parametrize(
    "raw",
    [
        b'{"a":1,"a":1}',
        b'{"a":12,"b":2,"a":1}',
        b'{"a":1,"b":2,"a":12}',
        b'{"a":1,"\\u0061":1}',
        b'{"a":"12}","a":123}',
    ],
)
def test_duplicate_keys_cannot_hide(raw):
    """In escapes, or behind values of another length."""
    with pytest.raises(BadRequestError, match="twice"):
        split_object(raw)


@given(st.dictionaries(st.text(max_size=6), JSON, max_size=6))
def test_the_engine_gets_what_the_client_sent(extra):
    """Values and order, for any fields that are not ours."""
    body = {**extra, "model": "m", "messages": [{"role": "user", "content": "é"}]}
    for ours in (
        "cache_salt",
        "stream_options",
        "kv_transfer_params",
        "ec_transfer_params",
        "stream",
    ):
        body.pop(ours, None)
    sent = CompletionBody(json.dumps(body).encode(), Api.CHAT).for_engine("salt")
    assert list(json.loads(sent).items()) == [*body.items(), ("cache_salt", "salt")]


def test_the_connector_is_told_the_report_id_and_only_that():
    """A client's own kv_transfer_params never reach the engine, with a report id or without."""
    raw = b'{"model":"m","messages":[],"kv_transfer_params":{"headstart.request_id":"x","a":1}}'
    body = CompletionBody(raw, Api.CHAT)
    assert "kv_transfer_params" not in json.loads(body.for_engine("s"))
    sent = json.loads(body.for_engine("s", "r1"))
    assert sent["kv_transfer_params"] == {"headstart.request_id": "r1"}


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        (b'{"a": 1.50,"kv_transfer_params":{"x":1},"b":"\\u00e9"}', b'{"a":1.50,"b":"\\u00e9"}'),
        (b'{"kv_cache_report_mode":"full"}', b"{}"),
        (b'{"kv\\u005ftransfer_params":{},"ec_transfer_params":1,"kv_transfer_params":2}', b"{}"),
        (b'{ "a" : 1.50 }', b'{ "a" : 1.50 }'),
        (b"null", b"null"),
        (b'["kv_transfer_params"]', b'["kv_transfer_params"]'),
    ],
)
def test_connectors_cannot_be_steered_through_vllm_xargs(given, sent):
    """Their keys go, however they are written; everything else stays byte for byte."""
    raw = b'{"model":"m","messages":[],"ec_transfer_params":{"a":1},"vllm_xargs":' + given + b"}"
    got = CompletionBody(raw, Api.CHAT).for_engine("s")
    assert got == b'{"model":"m","messages":[],"vllm_xargs":' + sent + b',"cache_salt":"s"}'


def test_keys_that_only_the_engine_could_read_are_refused():
    """A lone surrogate is one character to Python's reader and an error to ours."""
    raw = b'{"model":"m","messages":[],"vllm_xargs":{"\\ud800":1,"kv_transfer_params":{}}}'
    with pytest.raises(BadRequestError, match="not valid JSON"):
        CompletionBody(raw, Api.CHAT)


def test_fields_are_decoded_when_they_are_looked_at():
    """The renderer sees an ordinary mapping."""
    body = CompletionBody(b'{"model":"m","messages":[],"tools":[{"a":1}]}', Api.CHAT)
    assert body.fields["tools"] == [{"a": 1}]
    assert dict(body.fields) == {"model": "m", "messages": [], "tools": [{"a": 1}]}
    assert "nothing" not in body.fields
    assert len(body.fields) == 3


def test_null_stream_options_mean_none():
    """As in OpenAI's API."""
    raw = b'{"model":"m","messages":[],"stream":true,"stream_options":null}'
    body = CompletionBody(raw, Api.CHAT)
    assert not body.wants_usage
    assert json.loads(body.for_engine("s"))["stream_options"] == {"include_usage": True}


def test_stream_options_of_a_whole_answer_are_the_engines_to_judge():
    """It refuses them."""
    raw = b'{"model":"m","messages":[],"stream_options":{"include_usage":true}}'
    sent = CompletionBody(raw, Api.CHAT).for_engine("s")
    assert json.loads(sent)["stream_options"] == {"include_usage": True}


def test_prompt_embeds_stand_in_for_a_prompt():
    """vLLM takes them instead."""
    CompletionBody(b'{"model":"m","prompt_embeds":"x"}', Api.COMPLETIONS)


def test_numbers_that_no_reader_can_hold_are_refused():
    """In a field that we read."""
    with pytest.raises(BadRequestError, match="`messages` cannot be read"):
        CompletionBody(b'{"model":"m","messages":[1e999]}', Api.CHAT)

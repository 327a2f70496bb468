"""The envelope, and what becomes of an engine's errors."""

from __future__ import annotations

import json

import pytest

from engine_adapter.base import (
    EngineAdapterError,
    EngineLostError,
    EngineTimeoutError,
    EngineUnreachableError,
)
from gateway.web.errors import (
    BadRequestError,
    encode_error,
    encode_event,
    from_engine_error,
    upstream_body,
)


def test_envelope():
    """All four fields, always."""
    error = BadRequestError("no", param="model", code="c")
    body = {"message": "no", "type": "invalid_request_error", "param": "model", "code": "c"}
    assert json.loads(encode_error(error)) == {"error": body}
    assert encode_event(error) == b"data: " + encode_error(error) + b"\n\n"


@pytest.mark.parametrize(
    ("error", "status", "retry_after_s"),
    [
        (EngineUnreachableError("x"), 503, 1),
        (EngineTimeoutError("x"), 504, None),
        (EngineLostError("x"), 502, None),
        (EngineAdapterError("x"), 502, None),
    ],
)
def test_engine_errors_have_a_status(error, status, retry_after_s):
    """Details of the engine's address stay in the log."""
    answer = from_engine_error(error)
    assert (answer.status, answer.retry_after_s) == (status, retry_after_s)


def test_envelopes_of_the_engine_are_unchanged():
    """Byte for byte, with vLLM's integer code and fields that we do not know."""
    raw = b'{"error": {"message":"m","type":"BadRequestError","param":null,"code":400,"x":1}}'
    assert upstream_body(400, raw) is raw


@pytest.mark.parametrize(
    ("status", "raw", "message", "kind"),
    [
        (404, b'{"detail":"Not Found"}', "Not Found", "invalid_request_error"),
        (500, b"Internal Server Error", "Internal Server Error", "server_error"),
        (502, b"", "the engine answered 502", "server_error"),
        (500, b"\xff\xfe", "\ufffd\ufffd", "server_error"),
        (500, b'{"error": "text"}', '{"error": "text"}', "server_error"),
    ],
)
def test_other_bodies_are_wrapped(status, raw, message, kind):
    """Whatever it was, the client can read it."""
    error = json.loads(upstream_body(status, raw))["error"]
    assert (error["message"], error["type"]) == (message, kind)

"""Errors that clients see, in OpenAI's envelope {error: {message, type, param, code}}.

Each class stands for one HTTP status; whoever raises it gives the sentence. The names of types and
codes are those of the OpenAI API.
"""

from __future__ import annotations

import msgspec

from engine_adapter.base import (
    EngineAdapterError,
    EngineLostError,
    EngineTimeoutError,
    EngineUnreachableError,
)


class GatewayError(Exception):
    """Base of every answer that is an error.

    `param` names the field at fault; `retry_after_s` becomes the header `retry-after`.
    """

    status = 500
    type = "server_error"
    code: str | None = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or self.code
        self.retry_after_s = retry_after_s


class BadRequestError(GatewayError):
    """The client's mistake."""

    status = 400
    type = "invalid_request_error"


class UnauthorizedError(BadRequestError):
    """No API key, or one that belongs to nobody."""

    status = 401
    code = "invalid_api_key"


class ForbiddenError(BadRequestError):
    """Not for whoever asks."""

    status = 403
    code = "forbidden"


class NotFoundError(BadRequestError):
    """No such route or model."""

    status = 404


class MethodNotAllowedError(BadRequestError):
    """The route exists, but not for this method."""

    status = 405

    def __init__(self, message: str, *, allow: str) -> None:
        super().__init__(message)
        self.allow = allow


class RequestTimeoutError(BadRequestError):
    """The client did not send its request in time."""

    status = 408
    code = "request_timeout"


class ConflictError(BadRequestError):
    """What is there already stands against it."""

    status = 409
    code = "conflict"


class BodyTooLargeError(BadRequestError):
    """The body is over limits.max_body."""

    status = 413
    code = "request_too_large"


class TooManyRequestsError(GatewayError):
    """All places are taken and so are all places to wait."""

    status = 429
    type = "rate_limit_error"
    code = "too_many_requests"


class BadGatewayError(GatewayError):
    """The engine answered something unusable, or broke off."""

    status = 502
    code = "engine_error"


class UnavailableError(GatewayError):
    """No engine, no place in time, or the gateway is stopping."""

    status = 503
    code = "unavailable"


class GatewayTimeoutError(GatewayError):
    """The engine fell silent."""

    status = 504
    code = "engine_timeout"


class DeadlineError(GatewayError):
    """The client's own deadline passed before an engine had begun."""

    status = 504
    code = "deadline_exceeded"


class ErrorBody(msgspec.Struct):
    """The inner object of the envelope."""

    message: str
    type: str
    param: str | None = None
    code: str | int | None = None


class Envelope(msgspec.Struct):
    """The whole error body."""

    error: ErrorBody


def from_engine_error(error: EngineAdapterError) -> GatewayError:
    """What the client is told when the engine gave no answer."""
    if isinstance(error, EngineUnreachableError):
        return UnavailableError("the engine cannot be reached; try again soon", retry_after_s=1)
    if isinstance(error, EngineTimeoutError):
        return GatewayTimeoutError("the engine did not answer in time")
    if isinstance(error, EngineLostError):
        return BadGatewayError("the engine broke off before its answer was complete")
    return BadGatewayError("the engine's answer cannot be used")


def encode_error(error: GatewayError) -> bytes:
    """The envelope as JSON."""
    body = ErrorBody(error.message, error.type, error.param, error.code)
    return msgspec.json.encode(Envelope(body))


def encode_event(error: GatewayError) -> bytes:
    """The envelope as a server-sent event, for a stream that has begun."""
    return b"data: " + encode_error(error) + b"\n\n"


class _Detail(msgspec.Struct):
    """The error body of the engine's web framework (unknown routes and the like)."""

    detail: str


def upstream_body(status: int, body: bytes) -> bytes:
    """The engine's error body, unchanged when it is an envelope, else wrapped in one."""
    try:
        msgspec.json.decode(body, type=Envelope)
    except (msgspec.DecodeError, RecursionError):
        pass
    else:
        return body
    try:
        message = msgspec.json.decode(body, type=_Detail).detail
    except (msgspec.DecodeError, RecursionError):
        message = body[:1000].decode("utf-8", "replace").strip() or f"the engine answered {status}"
    kind = "invalid_request_error" if status < 500 else "server_error"
    return msgspec.json.encode(Envelope(ErrorBody(message, kind)))

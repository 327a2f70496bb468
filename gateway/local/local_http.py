"""A small blocking HTTP client for the command line: JSON in, JSON out, and lines of a stream."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gateway.settings.user_error import UserError

# What we talk to is on this host or in this cluster: no proxy of the environment is asked.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class HttpError(UserError):
    """No answer, or not the one that was hoped for."""


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """A complete answer, whatever its status."""

    url: str
    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """The decoded body. Raises HttpError for an error status or for anything but JSON."""
        if self.status >= 400:
            raise HttpError(f"{self.url} answered {self.status}: {self._message()}")
        try:
            return json.loads(self.body)
        except ValueError as error:
            raise HttpError(f"{self.url} did not answer with JSON; what listens there?") from error

    def _message(self) -> str:
        try:
            decoded = json.loads(self.body)
            return str(decoded["error"]["message"])
        except (ValueError, LookupError, TypeError):
            return self.body[:200].decode("utf-8", errors="replace").strip() or "no reason given"


def request(
    url: str,
    body: object = None,
    *,
    method: str | None = None,
    key: str | None = None,
    timeout_s: float = 10.0,
) -> HttpAnswer:
    """GET, or POST when there is a body, unless a `method` is given; `key`: sent as a Bearer.
    Raises HttpError only when no answer comes."""
    prepared = _prepared(url, body)
    prepared.method = method or prepared.get_method()
    if key is not None:
        prepared.add_header("Authorization", f"Bearer {key}")
    try:
        with _OPENER.open(prepared, timeout=timeout_s) as answer:
            return HttpAnswer(url, answer.status, dict(answer.headers), answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return HttpAnswer(url, error.code, dict(error.headers), error.read())
    except (OSError, http.client.HTTPException) as error:
        raise HttpError(f"no answer from {url}: {_reason(error)}") from error


def stream_lines(url: str, body: object, *, timeout_s: float = 600.0) -> Iterator[str]:
    """POST and yield each line of the answer as it comes. Raises HttpError."""
    try:
        with _OPENER.open(_prepared(url, body), timeout=timeout_s) as answer:
            for line in answer:
                yield line.decode("utf-8").rstrip("\r\n")
    except urllib.error.HTTPError as error:
        with error:
            HttpAnswer(url, error.code, dict(error.headers), error.read()).json()
    except (OSError, http.client.HTTPException) as error:
        raise HttpError(f"no answer from {url}: {_reason(error)}") from error


def is_healthy(url: str) -> bool:
    """Whether a GET is answered with 200."""
    try:
        return request(url, timeout_s=2.0).status == 200
    except HttpError:
        return False


def _prepared(url: str, body: object) -> urllib.request.Request:
    if body is None:
        return urllib.request.Request(url)
    data = json.dumps(body, ensure_ascii=False).encode()
    return urllib.request.Request(url, data, {"content-type": "application/json"})


def _reason(error: Exception) -> str:
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    text = reason.strerror if isinstance(reason, OSError) else None
    return text or str(reason) or type(reason).__name__

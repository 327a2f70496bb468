"""What answers a path: exact ones, and ones with names in braces such as /admin/replicas/{id}."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import unquote

from gateway.web.errors import BadRequestError, MethodNotAllowedError, NotFoundError
from gateway.web.exchange import Exchange

Handler = Callable[[Exchange], Awaitable[None]]

_MAX_PATTERN_PATH = 2048


@dataclass(frozen=True, slots=True)
class Route:
    """What answers a path. A route for GET answers HEAD too."""

    method: str
    handler: Handler
    while_draining: bool = False
    """Answered also when the gateway is stopping."""


@dataclass(frozen=True, slots=True)
class Found:
    """A route, and what stands in the path for the names in its braces."""

    route: Route
    parameters: Mapping[str, str]


_Methods = Mapping[str, Route]


@dataclass(frozen=True, slots=True)
class _Pattern:
    """Segments between slashes; one in braces stands for any text that is not empty."""

    segments: tuple[str, ...]
    methods: _Methods

    def match(self, raw: Sequence[str]) -> dict[str, str] | None:
        """What the names stand for, still encoded; None when the path is another one."""
        if len(raw) != len(self.segments):
            return None
        parameters: dict[str, str] = {}
        for wanted, given in zip(self.segments, raw, strict=True):
            if wanted.startswith("{") and given:
                parameters[wanted[1:-1]] = given
            elif wanted != given:
                return None
        return parameters


class Routes:
    """Exact paths are looked up; the few patterns are tried one after another."""

    def __init__(self, routes: Mapping[str, Route | tuple[Route, ...]]) -> None:
        """By path. Several routes for one path differ in their methods."""
        self._exact: dict[str, _Methods] = {}
        self._patterns: list[_Pattern] = []
        for path, given in routes.items():
            several = (given,) if isinstance(given, Route) else given
            methods = {route.method: route for route in several}
            assert len(methods) == len(several), f"{path}: a method stands twice"
            if "{" in path:
                self._patterns.append(_Pattern(tuple(path.split("/")), methods))
            else:
                self._exact[path] = methods

    def find(self, exchange: Exchange) -> Found:
        """Raises NotFoundError, MethodNotAllowedError; BadRequestError when it is not UTF-8."""
        request = exchange.request
        methods = self._exact.get(request.path)
        if methods is not None:
            return Found(_of_method(methods, exchange), {})
        raw = request.rel_url.raw_path
        if len(raw) <= _MAX_PATTERN_PATH:
            segments = raw.split("/")
            for pattern in self._patterns:
                parameters = pattern.match(segments)
                if parameters is not None:
                    route = _of_method(pattern.methods, exchange)
                    return Found(route, {name: _decoded(parameters[name]) for name in parameters})
        raise NotFoundError(f"Invalid URL ({request.method} {request.path[:200]})")


def _of_method(methods: _Methods, exchange: Exchange) -> Route:
    request = exchange.request
    route = methods.get("GET" if request.method == "HEAD" else request.method)
    if route is None:
        allowed = ", ".join(methods)
        raise MethodNotAllowedError(
            f"{request.path[:200]} answers {allowed}, not {request.method[:20]}", allow=allowed
        )
    return route


def _decoded(segment: str) -> str:
    """A slash that was written as %2F belongs to the segment, so each is decoded by itself."""
    try:
        return unquote(segment, errors="strict")
    except UnicodeDecodeError:
        raise BadRequestError("the path is not percent-encoded UTF-8") from None

"""Turns pydantic's errors into sentences that name the key and what is allowed there."""

from __future__ import annotations

import difflib
import types
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from gateway.settings.units import size
from gateway.settings.user_error import UserError

Location = tuple[str | int, ...]

_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string_too_short": "text that is not empty",
    "string": "text",
    "tuple": "a list",
    "dict": "a mapping of keys to values",
    "model": "a mapping of keys to values",
    "byte_size": "a size such as 512MiB or 4GiB",
}
_BOUNDS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("more than", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("less than", "lt"),
}


class ConfigError(UserError):
    """The configuration cannot be used. The message names each key to mend, one a line."""


def explain(model: type[BaseModel], data: Any, mistake: ErrorDetails) -> tuple[Location, str]:
    """Where in the file a mistake is and a sentence about it, without the place."""
    where = _path_in_file(data, mistake["loc"])
    kind = mistake["type"]
    context = mistake.get("ctx", {})
    if kind == "extra_forbidden":
        return where, f"{_dotted(where)}: unknown key; {_known(model, data, where)}"
    raw = _value_at(data, where)
    if kind == "model_attributes_type" and isinstance(raw, str):
        known = _kinds_at(model, where)
        wanted = raw if raw in known else min(known)
        return where, f"{_dotted(where)}: needs a kind: write {{kind: {wanted}}}, not {_shown(raw)}"
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        tag = context.get("tag")
        wrong = "is missing" if tag is None else f"{tag!r} is unknown"
        kinds = ", ".join(sorted(_kinds_at(model, where)))
        return (*where, "kind"), f"{_dotted((*where, 'kind'))}: {wrong}; use one of: {kinds}"
    return where, f"{_dotted(where) or 'the file'}: {_requirement(mistake, raw)}"


def _requirement(mistake: ErrorDetails, raw: object) -> str:
    """`raw`: what stands in the file."""
    kind, context = mistake["type"], mistake.get("ctx", {})
    if kind == "missing":
        return "is missing"
    if kind in ("value_error", "assertion_error"):
        return str(context.get("error", mistake["msg"]))
    shown = mistake["input"] if raw is None else raw
    return f"{_allowed(kind, context, raw) or mistake['msg']}, not {_shown(shown)}"


def _allowed(kind: str, context: Mapping[str, Any], raw: object) -> str | None:
    if kind in _BOUNDS:
        words, key = _BOUNDS[kind]
        return f"must be {words} {_bound(context[key], raw)}"
    if kind == "literal_error":
        return f"must be {context['expected']}"
    if kind == "too_short":
        return f"needs at least {context['min_length']} entry"
    if kind == "too_long":
        return f"may have at most {context['max_length']} entries"
    # int_parsing, int_type, model_type, byte_size, ...: the words before the last underscore.
    for name, words in _KINDS.items():
        if kind == name or kind.startswith(f"{name}_"):
            return f"must be {words}"
    return None


def _bound(bound: float, raw: object) -> str:
    """In the unit of what stands in the file."""
    if bound >= 1024 and bound % 1024 == 0:
        return size(bound).replace(" ", "")
    if isinstance(raw, str) and raw[-1:].isalpha():
        return f"{bound:g}s"
    return f"{bound:,}" if isinstance(bound, int) else f"{bound:g}"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _dotted(where: Location) -> str:
    text = ""
    for part in where:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _value_at(data: Any, where: Location) -> Any:
    for part in where:
        if isinstance(data, Mapping):
            data = data.get(part)
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
        else:
            return None
    return data


def _path_in_file(data: Any, location: Location) -> Location:
    """pydantic puts the tag of a union into the location, and the index of what stands alone where
    a list may stand; the file has no such levels."""
    path: list[str | int] = []
    for position, part in enumerate(location):
        last = position == len(location) - 1
        if isinstance(part, int) and not isinstance(data, list):
            continue
        if isinstance(data, Mapping):
            if part in data:
                data = data[part]
            elif not last or data.get("kind") == part:
                continue
        elif isinstance(data, Sequence) and isinstance(part, int) and part < len(data):
            data = data[part]
        path.append(part)
    return tuple(path)


def _known(model: type[BaseModel], data: Any, where: Location) -> str:
    names = sorted(_names_beside(model, data, where))
    close = difflib.get_close_matches(str(where[-1]), names, n=1, cutoff=0.6)
    if close:
        return f'did you mean "{close[0]}"?'
    return f"known here: {', '.join(names)}" if names else "remove it"


def _names_beside(model: type[BaseModel], data: Any, where: Location) -> set[str]:
    """The keys that may stand where the last part of `where` stands; of a policy those of its
    kind."""
    models = _models_at(model, where[:-1])
    for part in where[:-1]:
        data = data[part]
    kind = data.get("kind") if isinstance(data, Mapping) else None
    of_kind = [each for each in models if _kind_of(each) == kind]
    return {name for each in (of_kind if kind else []) or models for name in each.model_fields}


def _kinds_at(model: type[BaseModel], where: Location) -> set[str]:
    """What `kind` may be in the mapping at `where`."""
    return {kind for each in _models_at(model, where) if (kind := _kind_of(each)) is not None}


def _kind_of(model: type[BaseModel]) -> str | None:
    """The name under which a policy is chosen; None for what is no policy."""
    field = model.model_fields.get("kind")
    return None if field is None else str(field.default)


def _models_at(model: type[BaseModel], where: Location) -> list[type[BaseModel]]:
    at: list[Any] = [model]
    for part in where:
        if isinstance(part, str):
            at = [step for each in at for step in _entries(each)]
        at = [step for each in at for step in _inside(each, part)]
    at = [step for each in at for step in _entries(each)]
    return [each for each in at if isinstance(each, type) and issubclass(each, BaseModel)]


def _entries(annotation: Any) -> list[Any]:
    """Of a list what may stand in it: a single entry may be given without the list."""
    if get_origin(annotation) in (tuple, list):
        return _members(get_args(annotation)[0])
    return [annotation]


def _inside(annotation: Any, part: str | int) -> list[Any]:
    """What an annotation says of its element `part`; unions give one entry for each member."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        field = annotation.model_fields.get(str(part))
        return [] if field is None else _members(field.annotation)
    arguments = [each for each in get_args(annotation) if each is not Ellipsis]
    return _members(arguments[-1]) if arguments else []


def _members(annotation: Any) -> list[Any]:
    origin = get_origin(annotation)
    if origin is Annotated:
        return _members(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return [each for member in get_args(annotation) for each in _members(member)]
    return [annotation]

"""The body of a completion request: what we read of it, and what we add.

The top level is split into raw values, so that every value goes to the engine byte for byte and in
the client's order. Only the few fields named here are ever decoded; the rest is the engine's to
judge.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from gateway.web.errors import BadRequestError
from prefix_store.events import REPORT_SESSION
from prefix_store.protocol import Facts

REPORT_ID_KEY = "headstart.request_id"
"""Key in kv_transfer_params that our connector reads; see BlocksLoaded.request_id."""
FACTS_KEY = "headstart.facts"
"""The other one: prefix_store.protocol.Facts, as an object."""

_CONNECTORS_KEYS = ("kv_transfer_params", "ec_transfer_params")
_CONNECTORS_XARGS = frozenset({*_CONNECTORS_KEYS, "kv_cache_report_mode"})

_SPLIT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_KEY = re.compile(rb'[ \t\n\r]*"(?:[^"\\]|\\.)*"[ \t\n\r]*:[ \t\n\r]*')
_SEPARATOR = re.compile(rb"[ \t\n\r]*([,}])")


class Api(enum.Enum):
    """The two ways to ask for a completion, each with its path."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"


class RawFields(Mapping[str, Any]):
    """The top level of a body; values are decoded when they are looked at, once."""

    def __init__(self, raw: Mapping[str, msgspec.Raw]) -> None:
        self._raw = raw
        self._decoded: dict[str, Any] = {}

    def __getitem__(self, key: str) -> Any:
        if key not in self._decoded:
            raw = self._raw[key]
            try:
                self._decoded[key] = msgspec.json.decode(raw)
            except (msgspec.DecodeError, RecursionError) as error:
                raise BadRequestError(f"`{key}` cannot be read: {error}", param=key) from None
        return self._decoded[key]

    def get(self, key: str, default: Any = None) -> Any:
        # Most fields that are asked for are not there, and the mixin's own way raises for them.
        return self[key] if key in self._raw else default

    def __iter__(self) -> Iterator[str]:
        return iter(self._raw)

    def __len__(self) -> int:
        return len(self._raw)

    def __contains__(self, key: object) -> bool:
        return key in self._raw


class CompletionBody:
    """A checked body. Raises BadRequestError, naming the field, for what cannot be used."""

    def __init__(self, raw: bytes, api: Api) -> None:
        self._raw_fields = split_object(raw)
        self.fields = RawFields(self._raw_fields)
        self.num_bytes = len(raw)
        self.model = self._required("model", str, "a string")
        if not self.model:
            raise BadRequestError("`model` is empty", param="model")
        self.stream = bool(self._optional("stream", bool, "true or false"))
        if api is Api.CHAT:
            self._check_messages()
        elif "prompt_embeds" not in self.fields:
            self._required("prompt", (str, list), "a string or an array")
        options = self._optional("stream_options", dict, "an object") or {}
        asked = options.get("include_usage")
        if asked is not None and not isinstance(asked, bool):
            raise BadRequestError(
                "`stream_options.include_usage` must be true or false", param="stream_options"
            )
        self.wants_usage = bool(asked)
        """The client asked for the usage chunk of a stream."""

    def for_engine(
        self,
        salt: str,
        report_id: str | None = None,
        facts: Facts | None = None,
        *,
        full_report: bool = False,
    ) -> bytes:
        """The body as it goes to the engine: the client's values, with ours set.

        `report_id`: under which our connector shall report loads, and know the request; None where
        there is no connector. `facts`: for its store. `full_report`: the engine shall announce
        what it reuses too, not only what it computes.
        """
        fields = dict(self._raw_fields)
        # These steer connectors inside the engine: no client may.
        for name in _CONNECTORS_KEYS:
            fields.pop(name, None)
        if "vllm_xargs" in fields:
            fields["vllm_xargs"] = _without_connectors_keys(fields["vllm_xargs"])
        if full_report:
            fields["vllm_xargs"] = _with_full_report(fields.get("vllm_xargs"))
            fields["session_id"] = msgspec.Raw(msgspec.json.encode(REPORT_SESSION))
        if report_id is not None:
            hint: dict[str, Any] = {REPORT_ID_KEY: report_id}
            if facts is not None:
                hint[FACTS_KEY] = facts
            fields["kv_transfer_params"] = msgspec.Raw(msgspec.json.encode(hint))
        fields["cache_salt"] = msgspec.Raw(msgspec.json.encode(salt))
        if self.stream:
            fields["stream_options"] = self._stream_options()
        return msgspec.json.encode(fields)

    def _stream_options(self) -> msgspec.Raw:
        """The client's, with usage asked for, since the accounting needs it."""
        raw = self._raw_fields.get("stream_options")
        options = {} if raw is None else msgspec.json.decode(raw, type=dict[str, Any] | None) or {}
        if not self.wants_usage:
            # Without include_usage the engine ignores this one; with ours it would heed it.
            options.pop("continuous_usage_stats", None)
        options["include_usage"] = True
        return msgspec.Raw(msgspec.json.encode(options))

    def _check_messages(self) -> None:
        messages = self._required("messages", list, "an array")
        for i, message in enumerate(messages):
            if not isinstance(message, dict):
                raise BadRequestError(f"`messages[{i}]` must be an object", param="messages")

    def _required(self, name: str, kind: type | tuple[type, ...], allowed: str) -> Any:
        if name not in self.fields:
            raise BadRequestError(
                f"`{name}` is missing", param=name, code="missing_required_parameter"
            )
        value = self.fields[name]
        if not isinstance(value, kind):
            raise BadRequestError(f"`{name}` must be {allowed}", param=name)
        return value

    def _optional(self, name: str, kind: type, allowed: str) -> Any:
        value = self.fields.get(name)
        if value is not None and not isinstance(value, kind):
            raise BadRequestError(f"`{name}` must be {allowed}", param=name)
        return value


def _with_full_report(xargs: msgspec.Raw | None) -> msgspec.Raw:
    """`vllm_xargs` with the report mode added; what is no object the engine refuses."""
    try:
        members = {} if xargs is None else _SPLIT.decode(xargs)
    except msgspec.ValidationError:
        assert xargs is not None
        return xargs
    return msgspec.Raw(msgspec.json.encode({**members, "kv_cache_report_mode": "full"}))


def _without_connectors_keys(xargs: msgspec.Raw) -> msgspec.Raw:
    """`vllm_xargs` with its other members as they were; what is no object the engine refuses."""
    try:
        members = _SPLIT.decode(xargs)
    except msgspec.ValidationError:
        return xargs
    if _CONNECTORS_XARGS.isdisjoint(members):
        return xargs
    left = {name: value for name, value in members.items() if name not in _CONNECTORS_XARGS}
    return msgspec.Raw(msgspec.json.encode(left))


def split_object(raw: bytes) -> dict[str, msgspec.Raw]:
    """The members of a JSON object, undecoded; raises BadRequestError for anything else."""
    try:
        fields = _SPLIT.decode(raw)
        if not raw.isascii():
            raw.decode()
    except msgspec.ValidationError:
        raise BadRequestError("the body must be a JSON object") from None
    except msgspec.DecodeError as error:
        raise BadRequestError(f"the body is not valid JSON: {error}") from None
    except UnicodeDecodeError as error:
        raise BadRequestError(f"the body is not valid UTF-8 (byte {error.start})") from None
    except RecursionError:
        raise BadRequestError("the body is nested too deeply") from None
    _refuse_duplicates(raw, fields)
    return fields


def _refuse_duplicates(raw: bytes, fields: Mapping[str, msgspec.Raw]) -> None:
    """A key that stands twice means something else to each reader, so it is refused.

    The decoder keeps one member per key. Without duplicates its values stand in `raw` in the same
    order with nothing but keys and separators between, and exactly that is checked here.
    """
    # Without white space and escapes in keys the lengths alone say it: "key":value, each time.
    if sum(map(len, fields)) + sum(map(len, fields.values())) + 4 * len(fields) + 1 == len(raw):
        return
    position = raw.index(b"{") + 1
    last = b","
    for name, value in fields.items():
        key = _KEY.match(raw, position)
        member = bytes(value)
        if key is None or not raw.startswith(member, key.end()):
            raise _duplicate(name)
        separator = _SEPARATOR.match(raw, key.end() + len(member))
        if separator is None:
            raise _duplicate(name)
        position, last = separator.end(), separator[1]
    if fields and last != b"}":
        raise _duplicate(None)


def _duplicate(name: str | None) -> BadRequestError:
    where = "" if name is None else f" (at or before `{name}`)"
    return BadRequestError(f"a key stands twice at the top level of the body{where}")

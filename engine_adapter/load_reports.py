"""Which requests got stored blocks, as the engines' connectors report it."""

from __future__ import annotations

import re
from collections import OrderedDict

import msgspec

from prefix_store.events import BlocksLoaded

_INTERNAL_ID = re.compile(
    r"""
    (?:(?P<sample>\d+)_)?             # parallel sampling: <sample>_<id>   (n > 1)
    (?:
        chatcmpl-(?P<chat>.+?)
      | cmpl-(?P<completion>.+?)-\d+  # one for each prompt of the body
    )
    (?:-[0-9a-f]{8})?                 # what the engine adds to make ids unique
    """,
    re.VERBOSE | re.DOTALL,
)


def client_request_id(internal_id: str) -> str:
    """The `X-Request-Id` in an engine's internal id of a request; an id of another form is
    returned as it is. Sources, vLLM 0.32: entrypoints/openai/{chat_completion,completion}/
    serving.py, v1/engine/input_processor.py (assign_request_id), v1/engine/parallel_sampling.py."""
    match = _INTERNAL_ID.fullmatch(internal_id)
    if match is None:
        return internal_id
    return match["chat"] or match["completion"]


def is_repeated_sample(internal_id: str) -> bool:
    """True for the second and later answers to one prompt (n > 1): the prompt counts once."""
    match = _INTERNAL_ID.fullmatch(internal_id)
    return match is not None and int(match["sample"] or 0) > 0


class LoadReports:
    """Reports by the request id that the gateway sent, until they are taken. Bounded: the oldest go
    first, since a request that ended without asking never asks again."""

    def __init__(self, max_requests: int = 4096) -> None:
        self._max_requests = max_requests
        self._loads: OrderedDict[str, BlocksLoaded] = OrderedDict()
        self.received = 0
        self.not_counted = 0
        """Failed loads, repeats after a preemption, and repeats for further samples."""
        self.forgotten = 0
        """Dropped since nobody had asked for them."""

    def __len__(self) -> int:
        return len(self._loads)

    def add(self, loaded: BlocksLoaded) -> None:
        """A report came in. Several for one request add up."""
        self.received += 1
        if not loaded.ok or loaded.preempted or is_repeated_sample(loaded.request_id):
            self.not_counted += 1
            return
        request_id = client_request_id(loaded.request_id)
        before = self._loads.get(request_id)
        self._loads[request_id] = msgspec.structs.replace(
            loaded,
            request_id=request_id,
            num_tokens=loaded.num_tokens + (before.num_tokens if before else 0),
            num_bytes=loaded.num_bytes + (before.num_bytes if before else 0),
            duration_s=loaded.duration_s + (before.duration_s if before else 0.0),
        )
        if len(self._loads) > self._max_requests:
            self._loads.popitem(last=False)
            self.forgotten += 1

    def take(self, request_id: str) -> BlocksLoaded | None:
        """All loads of a request, once; None when there were none."""
        return self._loads.pop(request_id, None)

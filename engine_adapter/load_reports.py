"""What the engines' connectors loaded for which request, as they report it."""

from __future__ import annotations

from collections import OrderedDict

from prefix_store.events import BlocksLoaded


class LoadReports:
    """Reports by `BlocksLoaded.request_id`, until they are taken. Bounded: the oldest go first,
    since a request that ended without asking never asks again.

    One body can be several requests in the engine: n > 1 answers to one prompt, or several
    prompts. All of them report under the same id, but the engine's usage tells of one prompt of
    one of them (of whichever answered first in a stream, ended last in a whole answer; vLLM 0.32:
    v1/engine/parallel_sampling.py, entrypoints/openai/*/serving.py). So the first report counts:
    it is the load that brought the prompt's blocks in, and further ones are repeats.
    """

    def __init__(self, max_requests: int = 4096) -> None:
        self._max_requests = max_requests
        self._loads: OrderedDict[str, BlocksLoaded] = OrderedDict()
        self.received = 0
        self.not_counted = 0
        """Repeats: after a preemption, or for a further answer or prompt of the same body."""
        self.forgotten = 0
        """Dropped since nobody had asked for them."""

    def __len__(self) -> int:
        return len(self._loads)

    def add(self, loaded: BlocksLoaded) -> None:
        """A report came in. Failed loads count as well: the engine's usage contains them."""
        self.received += 1
        if loaded.preempted or loaded.request_id in self._loads:
            self.not_counted += 1
            return
        self._loads[loaded.request_id] = loaded
        if len(self._loads) > self._max_requests:
            self._loads.popitem(last=False)
            self.forgotten += 1

    def take(self, request_id: str) -> BlocksLoaded | None:
        """The load of a request, once; None when there was none."""
        return self._loads.pop(request_id, None)

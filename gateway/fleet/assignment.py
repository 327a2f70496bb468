"""A request and the place at a replica that it got."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine_adapter.base import Prompt
from gateway.fleet.decisions import Made
from gateway.fleet.replica import Replica
from gateway.fleet.ticket import Ticket
from gateway.fleet.warming import Warming
from policies.routing.base import RouteRequest
from policies.routing.work import Observed
from prefix_store.base import BlockHash
from prefix_store.residency import Match


@dataclass(slots=True)
class Asked:
    """What a request asks of the fleet."""

    key: str
    """Of this request alone; request ids are the clients'."""
    request_id: str
    model: str
    """As the client named it; an adapter's name too."""
    block_size: int
    prompt: Prompt | None
    route: RouteRequest
    ticket: Ticket
    match: Match | None = None
    """What was where when the prompt was noted, until it is used."""
    tried: set[str] = field(default_factory=set)
    """Replicas that failed it."""

    @property
    def hashes(self) -> Sequence[BlockHash]:
        return self.prompt.block_hashes if self.prompt is not None else ()

    @property
    def num_tokens(self) -> int:
        """Of the prompt; 0 where it is not known."""
        return self.prompt.num_tokens if self.prompt is not None else 0

    def reusable_tokens(self, num_blocks: int) -> int:
        """Tokens of the first `num_blocks` blocks that an engine can reuse: it computes the last
        token of a prompt always, so a block that ends with it brings nothing."""
        most = max(0, self.num_tokens - 1) // self.block_size
        return min(num_blocks, most) * self.block_size


@dataclass(slots=True, eq=False)
class Assignment:
    """A replica with a place for one request."""

    key: str
    """Of the request, in the replica's estimate."""
    replica: Replica
    made: Made
    match: Match | None
    """What was where when it was decided."""
    device_blocks: int
    """Blocks of the prompt in the replica's own cache, or on the way there."""
    captured_blocks: int
    """Those on the path to it: in its cache, or in a tier that it can load."""
    warming: Warming | None = None
    """The prompt's new part, that this request is the first to compute."""

    def ended(self, now: float, observed: Observed | None) -> None:
        """The request has ended; what it took, where that is known. Only the first call counts."""
        self.replica.estimate.ended(self.key, now, observed)

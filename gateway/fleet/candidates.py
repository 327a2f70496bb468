"""A replica in the eyes of one request."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.fleet.assignment import Asked
from gateway.fleet.replica import Replica
from gateway.fleet.warming import Warming
from policies.routing.base import Candidate, Evidence
from policies.routing.work import Work
from prefix_store.residency import Match


def work_of(asked: Asked, device_tokens: int, stored_tokens: int) -> Work:
    """What is left for the engine when so many tokens are reused."""
    reused = device_tokens + stored_tokens
    return Work(
        uncached_tokens=max(1, asked.num_tokens - reused),
        stored_tokens=stored_tokens,
        context_tokens=reused,
    )


@dataclass(frozen=True, slots=True)
class Known:
    """Of the blocks of one prompt, when a decision is made."""

    match: Match | None
    """What is where; None where the prompt is not known."""
    joined: Warming | None
    """Who computes more of it right now than anybody holds: its replica will hold that."""

    def device_blocks(self, asked: Asked, replica: Replica) -> int:
        """In the replica's own cache, or on the way there."""
        blocks = replica.device_blocks(self.match)
        if self.joined is not None and self.joined.replica == replica.id:
            blocks = max(blocks, self.joined.blocks_of(asked.hashes))
        return blocks

    def captured_blocks(self, asked: Asked, replica: Replica) -> int:
        """On the path to the replica: those, or more of them in a tier that it can load."""
        return max(self.device_blocks(asked, replica), replica.captured_blocks(self.match))


def candidate_of(
    asked: Asked, replica: Replica, known: Known, evidence: Evidence, now: float
) -> Candidate:
    """`now`: of the clock of all estimates."""
    device = asked.reusable_tokens(known.device_blocks(asked, replica))
    stored = max(0, asked.reusable_tokens(replica.captured_blocks(known.match)) - device)
    estimate = replica.estimate
    expected = estimate.expect(work_of(asked, device, stored), now)
    return Candidate(
        replica=replica.id,
        running=estimate.running,
        waiting=estimate.waiting,
        capacity=replica.places.limit,
        device_tokens=device,
        stored_tokens=stored,
        queue_s=expected.queue_s,
        load_s=expected.load_s,
        prefill_s=expected.prefill_s,
        kv_free=estimate.kv_free,
        evidence=evidence,
    )

"""Which replica gets a request, and what of its prompt that replica can reuse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine_adapter.engine_client import EngineClient
from prefix_store.residency import Holder, Match, Medium


@dataclass(frozen=True, slots=True)
class Replica:
    """One engine and the holders on the way to it."""

    id: str
    client: EngineClient
    holders: tuple[Holder, ...]
    """Its own device memory and the tiers of the store on its host."""

    @property
    def has_store(self) -> bool:
        """Its engine runs our connector, which loads from a store."""
        return any(holder.medium is not Medium.DEVICE for holder in self.holders)


@dataclass(frozen=True, slots=True)
class Choice:
    """A replica, and the blocks resident on its path."""

    replica: Replica
    captured_blocks: int


def ranked(replicas: Sequence[Replica], match: Match | None) -> list[Choice]:
    """All of them, best first: those that could just be reached, by the blocks on their path, and
    among equals by the fewest running requests."""
    choices = [Choice(replica, _captured(replica, match)) for replica in replicas]
    if len(choices) > 1:
        choices.sort(key=_rank)
    return choices


def _rank(choice: Choice) -> tuple[bool, int, int]:
    client = choice.replica.client
    return (client.unreachable, -choice.captured_blocks, client.in_flight)


def _captured(replica: Replica, match: Match | None) -> int:
    if match is None:
        return 0
    return max((match.by_holder.get(holder, 0) for holder in replica.holders), default=0)

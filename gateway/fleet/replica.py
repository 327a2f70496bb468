"""One engine of the fleet, and all that is known of it here."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine_adapter.engine_client import EngineClient
from gateway.fleet.activity import Activity
from gateway.fleet.condition import Condition
from gateway.fleet.loss import Losses
from gateway.fleet.places import Places
from policies.engine import EngineConfig
from policies.routing.replica_estimate import ReplicaEstimate
from prefix_store.residency import Holder, Match, Medium


@dataclass(slots=True, eq=False)
class Replica:
    """Its parts belong to the fleet, which opens and closes them."""

    config: EngineConfig
    client: EngineClient
    holders: tuple[Holder, ...]
    """Its own device memory and the tiers that its store can load from."""
    condition: Condition
    places: Places
    estimate: ReplicaEstimate
    activity: Activity = field(default_factory=Activity)
    losses: Losses = field(default_factory=Losses)

    @property
    def id(self) -> str:
        return self.config.id

    @property
    def device(self) -> Holder:
        return self.holders[0]

    @property
    def has_store(self) -> bool:
        """Its engine runs our connector, which loads from a store."""
        return any(holder.medium is not Medium.DEVICE for holder in self.holders)

    def device_blocks(self, match: Match | None) -> int:
        """Blocks of a prompt that its own cache holds."""
        return 0 if match is None else match.by_holder.get(self.device, 0)

    def captured_blocks(self, match: Match | None) -> int:
        """Blocks of a prompt on the path to it: in its cache, or in a tier that it can load."""
        return 0 if match is None else match.run_of(self.holders)

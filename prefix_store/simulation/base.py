"""The simulation's error."""

from __future__ import annotations

from prefix_store.base import StoreError


class SimulationError(StoreError):
    """Something that the user gave cannot be simulated. The message says what to change."""

"""Where the event stream of one engine or store stands."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EventState:
    """Where one stream stands. Counts are since the start."""

    source: str
    connected: bool
    lacking: bool
    """Something that the publisher has may be unknown here."""
    problem: str | None
    """Why, in one sentence; None when all is well or will be in a moment."""
    incarnation: int
    """Lives of the publisher that were seen; 1 is the first."""
    last_sequence: int | None
    lag_s: float | None
    """From publication until it was applied, of the newest live batch; more while one that waits is
    older than that."""
    batches: int
    events: int
    num_bytes: int
    gaps: int
    replays: int
    resyncs: int
    """Times everything known of the publisher was thrown away."""
    orphans: int
    """Blocks below a parent that was never announced."""
    malformed: int
    """Messages that could not be understood."""

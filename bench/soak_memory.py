"""Memory of a process over a soak, and whether it grows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MIB = 2**20
FLAT_MIB = 1.0
"""Growth per 100,000 requests below which memory counts as flat: 1,000,000 would add 10 MiB."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What a look at the gateway said."""

    at_s: float
    requests: int
    """Answered so far."""
    rss_bytes: int
    index_bytes: int | None
    """Of its index and its memo, as it counts them itself; None where it did not answer."""
    memo_bytes: int | None
    in_flight: int | None
    replicas: int | None


@dataclass(frozen=True, slots=True)
class Trend:
    """A straight line through the second half of the samples, by requests."""

    samples: int
    from_requests: int
    to_requests: int
    growth_mib: float
    """Per 100,000 requests."""
    error_mib: float
    """One standard error of `growth_mib`."""
    last_mib: float

    @property
    def is_flat(self) -> bool:
        return self.growth_mib <= FLAT_MIB


def trend_of(samples: Sequence[Sample]) -> Trend | None:
    """By least squares; None where there are fewer than three samples to go by. What it says is
    biased by what happens to fall into the halves: bounds that fill late look like growth."""
    if not samples:
        return None
    half = samples[-1].requests / 2
    late = [sample for sample in samples if sample.requests >= half]
    n = len(late)
    if n < 3 or late[0].requests == late[-1].requests:
        return None
    xs = [sample.requests / 100_000 for sample in late]
    ys = [sample.rss_bytes / MIB for sample in late]
    mean_x, mean_y = sum(xs) / n, sum(ys) / n
    spread = sum((x - mean_x) ** 2 for x in xs)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread
    rest = sum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in zip(xs, ys, strict=True))
    error = (rest / (n - 2) / spread) ** 0.5
    return Trend(n, late[0].requests, late[-1].requests, slope, error, ys[-1])


def rss_bytes(pid: int) -> int:
    """Resident memory of a process (proc(5), VmRSS)."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise ProcessLookupError(f"process {pid} has ended")

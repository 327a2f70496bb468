"""One ended request as increments, and sums of increments as WindowStats."""

from __future__ import annotations

import enum
from collections.abc import MutableSequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gateway.accounts import histogram
from gateway.accounts.record import FirstToken, Outcome, RequestRecord
from gateway.accounts.stats_schema import (
    DeliveredTokens,
    Durations,
    FirstTokenTimes,
    HitRates,
    PrefillSaved,
    PromptTokenCounts,
    RequestCounts,
    WindowStats,
)
from gateway.accounts.waterfall import Waterfall

PARTS = ("total", "gateway", "queue", "prefill", "delivery")
"""Time to first token and its parts, in the order of their columns and histograms."""

NUM_BINS = len(PARTS) * histogram.NUM_BUCKETS


class Column(enum.IntEnum):
    """What is summed, besides the histograms."""

    OK = 0
    CANCELLED = enum.auto()
    REFUSED = enum.auto()
    ENGINE_ERROR = enum.auto()
    PROMPTS = enum.auto()
    HITS = enum.auto()
    TOO_SHORT = enum.auto()
    TOTAL_TOKENS = enum.auto()
    NEVER_SEEN_TOKENS = enum.auto()
    EVICTED_TOKENS = enum.auto()
    ELSEWHERE_TOKENS = enum.auto()
    NOT_DELIVERED_TOKENS = enum.auto()
    DEVICE_TOKENS = enum.auto()
    MEMORY_TOKENS = enum.auto()
    DISK_TOKENS = enum.auto()
    REDIS_TOKENS = enum.auto()
    UNPREDICTED_TOKENS = enum.auto()
    UNATTRIBUTED_TOKENS = enum.auto()
    UNREPORTED_TOKENS = enum.auto()
    OUTPUT_TOKENS = enum.auto()
    MISMATCHES = enum.auto()
    UNRENDERED = enum.auto()
    RENDERINGS_CHECKED = enum.auto()
    RENDERINGS_UNCONFIRMED = enum.auto()
    SAVED_S = enum.auto()
    SAVED_ERROR_S = enum.auto()
    SAVED_REQUESTS = enum.auto()
    LOST_S = enum.auto()
    LOSING_REQUESTS = enum.auto()
    FIRST_TOKEN_S = enum.auto()
    """The first of len(PARTS) columns."""


NUM_COLUMNS = int(Column.FIRST_TOKEN_S) + len(PARTS)

_OUTCOMES = {
    Outcome.OK: Column.OK,
    Outcome.CANCELLED: Column.CANCELLED,
    Outcome.REFUSED: Column.REFUSED,
    Outcome.ENGINE_ERROR: Column.ENGINE_ERROR,
}

Cells = MutableSequence[float]


@dataclass(frozen=True, slots=True)
class Saving:
    """What reuse brought to one request, in seconds."""

    net_s: float
    """Below zero: it took longer than without reuse."""
    error_s: float
    """One standard deviation of the prediction in it."""


def add_request(cells: Cells, record: RequestRecord) -> None:
    """What every request has, however it ended."""
    cells[_OUTCOMES[record.outcome]] += 1
    cells[Column.OUTPUT_TOKENS] += record.output_tokens
    cells[Column.MISMATCHES] += record.rendering_mismatch
    cells[Column.UNRENDERED] += record.unrendered
    if record.outcome is not Outcome.OK and record.prompt is not None:
        cells[Column.UNREPORTED_TOKENS] += record.prompt.total


def add_prompt(cells: Cells, steps: Waterfall, *, too_short: bool) -> None:
    """A prompt that was answered in full."""
    cells[Column.PROMPTS] += 1
    cells[Column.HITS] += steps.delivered > 0
    cells[Column.TOO_SHORT] += too_short
    cells[Column.TOTAL_TOKENS] += steps.total
    cells[Column.NEVER_SEEN_TOKENS] += steps.never_seen
    cells[Column.EVICTED_TOKENS] += steps.evicted
    cells[Column.ELSEWHERE_TOKENS] += steps.elsewhere
    cells[Column.NOT_DELIVERED_TOKENS] += steps.not_delivered
    cells[Column.DEVICE_TOKENS] += steps.device
    cells[Column.MEMORY_TOKENS] += steps.memory
    cells[Column.DISK_TOKENS] += steps.disk
    cells[Column.REDIS_TOKENS] += steps.redis
    cells[Column.UNPREDICTED_TOKENS] += steps.unpredicted
    cells[Column.UNATTRIBUTED_TOKENS] += steps.unattributed


def add_saving(cells: Cells, saving: Saving) -> None:
    """A hit whose saving, or loss, could be measured."""
    cells[Column.SAVED_REQUESTS] += 1
    cells[Column.SAVED_ERROR_S] += saving.error_s
    if saving.net_s < 0:
        add_loss(cells, -saving.net_s)
    else:
        cells[Column.SAVED_S] += saving.net_s


def add_loss(cells: Cells, lost_s: float) -> None:
    """A request that took longer than without reuse."""
    cells[Column.LOSING_REQUESTS] += 1
    cells[Column.LOST_S] += lost_s


def add_first_token(cells: Cells, bins: Cells, first: FirstToken) -> None:
    """Time to first token and the parts that are known."""
    durations = (first.ttft_s, first.gateway_s, first.queue_s, first.prefill_s, first.delivery_s)
    for part, duration_s in enumerate(durations):
        if duration_s is not None:
            # Parts are differences between two machines' clocks and can fall a little below zero.
            known_s = max(0.0, duration_s)
            cells[Column.FIRST_TOKEN_S + part] += known_s
            bins[part * histogram.NUM_BUCKETS + histogram.bucket_of(known_s)] += 1


def window_stats(
    cells: NDArray[np.float64], bins: NDArray[np.float64], covered_s: float
) -> WindowStats:
    """Shapes (NUM_COLUMNS,) and (NUM_BINS,)."""

    def count(column: Column) -> int:
        return round(float(cells[column]))

    outcomes = {outcome.value: count(column) for outcome, column in _OUTCOMES.items()}
    return WindowStats(
        covered_s=covered_s,
        requests=RequestCounts(total=sum(outcomes.values()), **outcomes),
        too_short_requests=count(Column.TOO_SHORT),
        prompt_tokens=_prompt_tokens(cells),
        output_tokens=count(Column.OUTPUT_TOKENS),
        hit_rates=_hit_rates(cells),
        first_token=_first_token(cells, bins),
        prefill_saved=_prefill_saved(cells),
        rendering_mismatches=count(Column.MISMATCHES),
        unrendered_prompts=count(Column.UNRENDERED),
        renderings_checked=count(Column.RENDERINGS_CHECKED),
        renderings_unconfirmed=count(Column.RENDERINGS_UNCONFIRMED),
    )


def _prompt_tokens(cells: NDArray[np.float64]) -> PromptTokenCounts:
    (
        total,
        never_seen,
        evicted,
        elsewhere,
        not_delivered,
        device,
        memory,
        disk,
        redis,
        unpredicted,
        unattributed,
        unreported,
    ) = (round(float(cell)) for cell in cells[Column.TOTAL_TOKENS : Column.UNREPORTED_TOKENS + 1])
    return PromptTokenCounts(
        total=total,
        never_seen=never_seen,
        evicted=evicted,
        elsewhere=elsewhere,
        not_delivered=not_delivered,
        delivered=DeliveredTokens(device=device, memory=memory, disk=disk, redis=redis),
        uncached=total - device - memory - disk - redis,
        unpredicted=unpredicted,
        unattributed=unattributed,
        unreported=unreported,
    )


def _hit_rates(cells: NDArray[np.float64]) -> HitRates:
    requests, hits = float(cells[Column.PROMPTS]), float(cells[Column.HITS])
    tokens = float(cells[Column.TOTAL_TOKENS])
    delivered = float(cells[Column.DEVICE_TOKENS : Column.REDIS_TOKENS + 1].sum())
    return HitRates(
        requests=round(requests),
        hits=round(hits),
        by_request=hits / requests if requests else None,
        by_token=delivered / tokens if tokens else None,
    )


def _prefill_saved(cells: NDArray[np.float64]) -> PrefillSaved:
    measured, hits = round(float(cells[Column.SAVED_REQUESTS])), round(float(cells[Column.HITS]))
    known = measured > 0 or (hits == 0 and cells[Column.PROMPTS] > 0)
    return PrefillSaved(
        saved_s=float(cells[Column.SAVED_S]) if known else None,
        lost_s=float(cells[Column.LOST_S]) if known else None,
        error_s=float(cells[Column.SAVED_ERROR_S]) if known else None,
        measured_requests=measured,
        unmeasured_requests=hits - measured,
        losing_requests=round(float(cells[Column.LOSING_REQUESTS])),
    )


def _first_token(cells: NDArray[np.float64], bins: NDArray[np.float64]) -> FirstTokenTimes:
    parts = {
        name: _durations(float(cells[Column.FIRST_TOKEN_S + part]), counts)
        for part, (name, counts) in enumerate(
            zip(PARTS, bins.reshape(len(PARTS), histogram.NUM_BUCKETS), strict=True)
        )
    }
    return FirstTokenTimes(**parts)


def _durations(sum_s: float, counts: NDArray[np.float64]) -> Durations:
    quantiles = histogram.quantiles(counts, (0.5, 0.9, 0.99))
    if quantiles is None:
        return Durations(count=0, mean_s=None, p50_s=None, p90_s=None, p99_s=None)
    count = round(float(counts.sum()))
    p50_s, p90_s, p99_s = quantiles
    return Durations(count=count, mean_s=sum_s / count, p50_s=p50_s, p90_s=p90_s, p99_s=p99_s)

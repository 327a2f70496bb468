"""GET /metrics: the statistics in Prometheus' text format.

Counters and gauges are read from one snapshot of the accounting at each scrape, so they agree with
/cache/stats; only the histograms of time to first token are kept here. Labels are bounded: replica
ids from the configuration, outcomes, kinds, reasons; never tenants, models or requests.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass

from prometheus_client import Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from gateway.accounts.record import FirstToken, Outcome, RequestRecord
from gateway.accounts.stats_schema import CacheStats, PromptTokenCounts, WindowStats
from gateway.accounts.tally import PARTS
from gateway.stats.fleet_metrics import fleet_metrics
from gateway.stats.metric_families import counter, gauge
from gateway.stats.store_metrics import store_metrics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

NO_REPLICA = "none"
"""Label of requests that reached no replica."""

_BUCKETS_S = (
    *(0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05),
    *(0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0),
)


class Metrics:
    """Its histograms are its own, so several can live in one process."""

    def __init__(self) -> None:
        self._first_token: dict[str, _FirstToken] = {}
        self.add_replica(NO_REPLICA)

    def add_replica(self, replica: str) -> None:
        """It has series of its own from now on."""
        self._first_token[replica] = _FirstToken(replica)

    def remove_replica(self, replica: str) -> None:
        """It has none any more."""
        self._first_token.pop(replica, None)

    def observe(self, record: RequestRecord) -> None:
        """Once for each ended request."""
        first = record.first_token
        if first is None:
            return
        histograms = self._first_token.get(record.replica or NO_REPLICA)
        if histograms is not None:  # else of a replica that is gone
            histograms.observe(first)

    def exposing(self, stats: CacheStats) -> Generator[None, None, bytes]:
        """The page, of type CONTENT_TYPE, in pieces of a few milliseconds at most: a family or a
        replica's histograms each."""
        texts = []
        for family in _families(stats):
            texts.append(_text(family))
            yield
        for number, histograms in enumerate(list(self._first_token.values())):
            texts.append(_text(histograms.family(), with_header=number == 0))
            yield
        return b"".join(texts)


class _FirstToken:
    """The histograms of one replica."""

    def __init__(self, replica: str) -> None:
        self._histogram = Histogram(
            "headstart_first_token_seconds",
            "Time to first token (part=total) and its parts, in seconds.",
            ("replica", "part"),
            registry=None,
            buckets=_BUCKETS_S,
        )
        self._parts = [self._histogram.labels(replica, part) for part in PARTS]

    def observe(self, first: FirstToken) -> None:
        parts = (first.ttft_s, first.gateway_s, first.queue_s, first.prefill_s, first.delivery_s)
        for histogram, duration_s in zip(self._parts, parts, strict=True):
            if duration_s is not None:
                histogram.observe(max(0.0, duration_s))

    def family(self) -> Metric:
        (family,) = self._histogram.collect()
        return family


@dataclass(frozen=True, slots=True)
class _Single(Collector):
    """What prometheus_client writes out: one family."""

    family: Metric

    def collect(self) -> Iterator[Metric]:
        yield self.family


def _text(family: Metric, *, with_header: bool = True) -> bytes:
    """In Prometheus' format. The families of several replicas are one there, with one header."""
    # When a series began is told by process_start_time_seconds, and would double the lines.
    family.samples = [each for each in family.samples if not each.name.endswith("_created")]
    text: bytes = generate_latest(_Single(family))
    return text if with_header else text.split(b"\n", 2)[2]


def _families(stats: CacheStats) -> Iterator[Metric]:
    info = GaugeMetricFamily("headstart_info", "Always 1.", labels=("version", "model"))
    info.add_metric((stats.version, stats.model), 1)
    yield info
    yield from _requests(stats)
    yield from _now(stats)
    yield from store_metrics(stats.store)
    yield from fleet_metrics(stats)


def _requests(stats: CacheStats) -> Iterator[Metric]:
    since_start = {id_: replica.windows.since_start for id_, replica in stats.replicas.items()}
    since_start[NO_REPLICA] = stats.without_replica.windows.since_start
    requests = counter("requests", "Ended requests.", "replica", "outcome")
    tokens = counter("prompt_tokens", "Prompt tokens of ok requests.", "replica", "kind")
    for replica, window in since_start.items():
        for outcome in Outcome:
            requests.add_metric((replica, outcome), getattr(window.requests, outcome))
        for kind, count in _steps(window.prompt_tokens).items():
            tokens.add_metric((replica, kind), count)
    yield requests
    yield tokens
    for name, text, value in _PLAIN:
        family = counter(name, text, "replica")
        for replica, window in since_start.items():
            family.add_metric((replica,), value(window))
        yield family


_PLAIN: tuple[tuple[str, str, Callable[[WindowStats], float]], ...] = (
    ("hit_requests", "Requests that reused a block.", lambda w: w.hit_rates.hits),
    ("too_short_requests", "Prompts too short to reuse a block.", lambda w: w.too_short_requests),
    (
        "unreported_prompt_tokens",
        "Prompt tokens of requests that did not end ok.",
        lambda w: w.prompt_tokens.unreported,
    ),
    (
        "unpredicted_prompt_tokens",
        "Reused tokens that the index did not know of.",
        lambda w: w.prompt_tokens.unpredicted,
    ),
    (
        "unattributed_prompt_tokens",
        "Reused tokens, counted as the device's, that may have come from the store.",
        lambda w: w.prompt_tokens.unattributed,
    ),
    ("output_tokens", "Generated tokens.", lambda w: w.output_tokens),
    (
        "rendering_mismatches",
        "Prompts whose length differs from the engine's.",
        lambda w: w.rendering_mismatches,
    ),
    ("renderings_checked", "Prompts compared with events.", lambda w: w.renderings_checked),
    (
        "renderings_unconfirmed",
        "Of these, prompts whose first block nobody announced.",
        lambda w: w.renderings_unconfirmed,
    ),
    ("unrendered_prompts", "Prompts that were not rendered.", lambda w: w.unrendered_prompts),
    (
        "prefill_saved_seconds",
        "Prefill time less load time saved by the hits that were measured.",
        lambda w: w.prefill_saved.saved_s or 0.0,
    ),
    (
        "prefill_lost_seconds",
        "What reuse cost where it was slower than a cold prefill.",
        lambda w: w.prefill_saved.lost_s or 0.0,
    ),
    ("losing_requests", "Requests made slower.", lambda w: w.prefill_saved.losing_requests),
    (
        "prefill_saved_error_seconds",
        "Error bar of headstart_prefill_saved_seconds_total.",
        lambda w: w.prefill_saved.error_s or 0.0,
    ),
    (
        "unmeasured_hit_requests",
        "Hits whose saving could not be measured.",
        lambda w: w.prefill_saved.unmeasured_requests,
    ),
)


def _steps(tokens: PromptTokenCounts) -> dict[str, int]:
    """The kinds add up to all prompt tokens."""
    return {
        "never_seen": tokens.never_seen,
        "evicted": tokens.evicted,
        "elsewhere": tokens.elsewhere,
        "not_delivered": tokens.not_delivered,
        "device": tokens.delivered.device,
        "memory": tokens.delivered.memory,
        "disk": tokens.delivered.disk,
        "redis": tokens.delivered.redis,
    }


def _now(stats: CacheStats) -> Iterator[Metric]:
    yield gauge("requests_in_flight", "Requests that are with an engine.", stats.in_flight)
    yield gauge("requests_waiting", "Requests that wait for a place.", stats.waiting)
    if stats.loop_lag_s is not None:
        yield gauge("event_loop_lag_seconds", "How late the event loop ran.", stats.loop_lag_s)
    if stats.index is not None:
        yield gauge("index_blocks", "Blocks in the radix index.", stats.index.blocks)
        yield gauge("index_used_bytes", "Size of the radix index.", stats.index.used_bytes)
        yield gauge("index_capacity_bytes", "Its bound.", stats.index.capacity_bytes)
    yield from _beside(stats)
    if stats.memo is not None:
        tokens = counter("rendered_tokens", "Prompt tokens rendered here.", "source")
        tokens.add_metric(("memo",), stats.memo.tokens_from_memo)
        tokens.add_metric(("tokenizer",), stats.memo.tokens_tokenized)
        yield tokens
        yield gauge("memo_used_bytes", "Size of the memo.", stats.memo.used_bytes)
        if stats.memo.capacity_bytes is not None:
            yield gauge("memo_capacity_bytes", "Its bound.", stats.memo.capacity_bytes)


def _beside(stats: CacheStats) -> Iterator[Metric]:
    family = counter("side_work", "Work beside the requests, by how it went.", "kind", "result")
    for kind, side in (("outcomes", stats.outcomes), ("request_log", stats.request_log)):
        if side is not None:
            for result in ("done", "dropped", "failed"):
                family.add_metric((kind, result), getattr(side, result))
    yield family

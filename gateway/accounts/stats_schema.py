"""The JSON of GET /cache/stats. Units stand in the names; null means "not known", never zero.

`CacheStats.model_json_schema()` exports the schema. What each number means in practice:
docs/stats.md.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from gateway.accounts.gauges import (
    Count,
    EventGauges,
    IndexGauges,
    MemoGauges,
    ReplicaGauges,
    RoutingGauges,
    Seconds,
    SideGauges,
    Stats,
    StoreGauges,
)

Share = Annotated[float, Field(ge=0, le=1)]


class RequestCounts(Stats):
    """Ended requests by how they ended."""

    total: Count = Field(description="All requests that ended in the window.")
    ok: Count = Field(description="Answered in full.")
    cancelled: Count = Field(description="The client went away first.")
    refused: Count = Field(
        description="Bad input, as the gateway or the engine (4xx) judged it, or no place."
    )
    engine_error: Count = Field(description="The engine failed or could not be reached.")


class DeliveredTokens(Stats):
    """Prompt tokens that were really reused, by where their KV came from."""

    device: Count = Field(description="From the engine's own cache, as the engine reports.")
    memory: Count = Field(description="From the store's memory, as the engine's connector reports.")
    disk: Count = Field(description="From the store's disk tier, likewise.")
    redis: Count = Field(description="From the store's Redis tier, likewise.")


class PromptTokenCounts(Stats):
    """The waterfall of the prompts that were answered in full, in tokens. never_seen + evicted +
    elsewhere + not_delivered + delivered = total, always."""

    total: Count = Field(description="Prompt tokens of requests that ended ok.")
    never_seen: Count = Field(
        description="Not in a full block that an engine or the store is known to have had: "
        "nothing could be reused."
    )
    evicted: Count = Field(description="Resident once, but nowhere any more.")
    elsewhere: Count = Field(description="Resident, but not where the request was sent.")
    not_delivered: Count = Field(
        description="Resident where the request was sent, yet the engine computed them again."
    )
    delivered: DeliveredTokens = Field(description="Really reused.")
    uncached: Count = Field(description="Went through prefill: total less delivered.")
    unpredicted: Count = Field(
        description="Part of delivered that the index did not know of; the index is behind."
    )
    unattributed: Count = Field(
        description="Part of delivered.device of which it is not known whether it came from the "
        "store: the device was not known to have it, and no load was reported."
    )
    unreported: Count = Field(
        description="Prompt tokens of requests that did not end ok. The engine did not say what "
        "it reused of them, so they are in none of the numbers above."
    )


class HitRates(Stats):
    """How often and how much was reused, of requests that ended ok."""

    requests: Count = Field(description="Requests that ended ok with a known prompt length.")
    hits: Count = Field(description="Those of which at least one block was delivered.")
    by_request: Share | None = Field(description="hits / requests; null without requests.")
    by_token: Share | None = Field(
        description="Delivered tokens / prompt tokens; null without prompt tokens."
    )


class Durations(Stats):
    """A distribution in seconds. Percentiles are within 5% (or 10 us); mean is exact."""

    count: Count = Field(description="Requests that were measured.")
    mean_s: Seconds | None = Field(description="Mean in seconds; null when count is 0.")
    p50_s: Seconds | None = Field(description="Median in seconds.")
    p90_s: Seconds | None = Field(description="90th percentile in seconds.")
    p99_s: Seconds | None = Field(description="99th percentile in seconds.")


class FirstTokenTimes(Stats):
    """Time to first token and its four parts. A part is missing where the engine is silent, so
    counts differ."""

    total: Durations = Field(description="From the end of the request's body to the first token.")
    gateway: Durations = Field(description="Until the request was on its way to the engine.")
    queue: Durations = Field(
        description="In the engine until it was scheduled; loads of stored blocks count here."
    )
    prefill: Durations = Field(description="From scheduling to the first token, in the engine.")
    delivery: Durations = Field(description="The rest: sockets, HTTP, serialisation.")


class PrefillSaved(Stats):
    """Prefill time that reuse saved: what the measured curve of the replica says a cold prompt of
    this length takes, less what the engine measured and less the time to load stored blocks. The
    net saving is saved_s - lost_s."""

    saved_s: Seconds | None = Field(
        description="Sum in seconds over the measured hits that were faster than cold; 0 when "
        "nothing was reused; null when there were no requests, or hits but no measured curve at "
        "their lengths."
    )
    lost_s: Seconds | None = Field(
        description="Sum in seconds of what the others were slower than cold, and of loads of "
        "which nothing was good. Null when saved_s is."
    )
    error_s: Seconds | None = Field(
        description="Error bar in seconds: the sum of one standard deviation of each prediction, "
        "as if all erred in the same direction. Null when saved_s is."
    )
    measured_requests: Count = Field(description="Hits that are in saved_s.")
    unmeasured_requests: Count = Field(
        description="Hits that are not: the engine reported no prefill time, or no prompt of "
        "comparable length has been computed on this replica yet."
    )
    losing_requests: Count = Field(description="Requests that are in lost_s.")

    @property
    def net_s(self) -> float | None:
        """In seconds; below zero when reuse cost more than it brought."""
        return None if self.saved_s is None else self.saved_s - (self.lost_s or 0.0)


class WindowStats(Stats):
    """What happened in one window of time."""

    covered_s: Seconds = Field(
        description="Length of the window in seconds: its span and up to 1/60 more, less after a "
        "recent start. Divide by this for rates."
    )
    requests: RequestCounts = Field(description="How many requests ended, and how.")
    too_short_requests: Count = Field(
        description="Of hit_rates.requests: prompts without one full block before their last "
        "token. They can never hit, whatever the cache holds."
    )
    prompt_tokens: PromptTokenCounts = Field(description="Where prompt tokens went.")
    output_tokens: Count = Field(description="Generated tokens, of all requests.")
    hit_rates: HitRates = Field(description="Reuse by request and by token.")
    first_token: FirstTokenTimes = Field(description="Time to first token and its parts.")
    prefill_saved: PrefillSaved = Field(description="Prefill time that reuse saved.")
    rendering_mismatches: Count = Field(
        description="Requests whose prompt length, as rendered here, differs from the engine's."
    )
    unrendered_prompts: Count = Field(
        description="Requests that could not be rendered here and were only passed on."
    )
    renderings_checked: Count = Field(
        description="Samples of prompts that an engine computed, compared with the blocks that "
        "engines announced; at most one every 2 s for each replica."
    )
    renderings_unconfirmed: Count = Field(
        description="Of these, the ones whose first block nobody announced: a suspicion that "
        "prompts of the right length are rendered to other tokens here."
    )


class WindowsStats(Stats):
    """The same numbers over four windows."""

    since_start: WindowStats = Field(description="Since the gateway started.")
    last_1m: WindowStats = Field(description="The last 60 to 61 s.")
    last_10m: WindowStats = Field(description="The last 600 to 610 s.")
    last_1h: WindowStats = Field(description="The last 3600 to 3660 s.")


class CurvePoint(Stats):
    """One point of the measured prefill curve of a replica."""

    uncached_tokens: Annotated[float, Field(gt=0)] = Field(
        description="Prompt tokens computed, nothing reused."
    )
    prefill_s: Seconds = Field(description="Prefill time in seconds.")
    error_s: Seconds = Field(description="One standard deviation in seconds.")
    observations: Count = Field(description="Requests behind this point, at most the newest 32.")


class ScopeStats(Stats):
    """Requests of one scope."""

    windows: WindowsStats = Field(description="Numbers over four windows.")


class ReplicaStats(Stats):
    """One replica."""

    windows: WindowsStats = Field(description="Numbers over four windows.")
    state: ReplicaGauges = Field(description="Right now.")
    prefill_curve: list[CurvePoint] = Field(
        description="What prefill costs here, measured; empty before the first request."
    )


class CacheStats(Stats):
    """GET /cache/stats."""

    version: str = Field(description="Version of Headstart.")
    model: str = Field(description="The model that is served.")
    uptime_s: Seconds = Field(description="Seconds since the gateway started.")
    in_flight: Count = Field(description="Requests that are with an engine.")
    waiting: Count = Field(description="Requests that wait for a place.")
    loop_lag_s: Seconds | None = Field(
        description="How late the event loop ran lately, in seconds; null when not measured."
    )
    total: ScopeStats = Field(
        description="All replicas, those that are gone too, and requests that reached none."
    )
    without_replica: ScopeStats = Field(
        description="Requests that reached no replica, such as refused ones; part of total."
    )
    replicas: dict[str, ReplicaStats] = Field(description="By replica id.")
    store: StoreGauges | None = Field(description="The store; null when it does not answer.")
    store_events: EventGauges | None = Field(
        description="The store's KV events; null when none are subscribed."
    )
    remote_stores: dict[str, EventGauges] = Field(
        description="KV events of other hosts' stores, by id."
    )
    routing: RoutingGauges | None = Field(description="How requests found their replicas.")
    index: IndexGauges | None = Field(description="The radix index.")
    memo: MemoGauges | None = Field(description="The memo of rendered prefixes.")
    outcomes: SideGauges | None = Field(
        description="Ends of answers that the store was told; null without a store."
    )
    request_log: SideGauges | None = Field(
        description="Lines of the request log; null where it is off."
    )

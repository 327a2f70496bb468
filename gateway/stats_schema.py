"""The JSON of GET /cache/stats. Units stand in the names; null means "not known", never zero.

`CacheStats.model_json_schema()` exports the schema. What each number means in practice:
docs/stats.md.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]


class Stats(BaseModel):
    """A part of the statistics; never changes once made."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class RequestCounts(Stats):
    """Ended requests by how they ended."""

    total: Count = Field(description="All requests that ended in the window.")
    ok: Count = Field(description="Answered in full.")
    cancelled: Count = Field(description="The client went away first.")
    refused: Count = Field(description="Answered by the gateway itself: bad input or no place.")
    engine_error: Count = Field(description="The engine failed or could not be reached.")


class DeliveredTokens(Stats):
    """Prompt tokens that were really reused, by where their KV came from."""

    device: Count = Field(description="From the engine's own cache, as the engine reports.")
    memory: Count = Field(description="From the store's memory, as the engine's connector reports.")


class PromptTokenCounts(Stats):
    """The waterfall of the prompts that were answered in full, in tokens. never_seen + evicted +
    elsewhere + not_delivered + delivered = total, always."""

    total: Count = Field(description="Prompt tokens of requests that ended ok.")
    never_seen: Count = Field(
        description="Not in a full block that the gateway has seen: nothing could be reused."
    )
    evicted: Count = Field(description="Seen before, but resident nowhere any more.")
    elsewhere: Count = Field(description="Resident, but not where the request was sent.")
    not_delivered: Count = Field(
        description="Resident where the request was sent, yet the engine computed them again."
    )
    delivered: DeliveredTokens = Field(description="Really reused.")
    uncached: Count = Field(description="Went through prefill: total less delivered.")
    unpredicted: Count = Field(
        description="Part of delivered that the index did not know of; the index is behind."
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
    this length takes, less what the engine measured; at least 0 for each request."""

    saved_s: Seconds | None = Field(
        description="Sum in seconds over the measured hits; 0 when nothing was reused; null when "
        "there were no requests, or hits but no measured curve at their lengths."
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


class WindowsStats(Stats):
    """The same numbers over four windows."""

    since_start: WindowStats = Field(description="Since the gateway started.")
    last_1m: WindowStats = Field(description="The last 60 to 61 s.")
    last_10m: WindowStats = Field(description="The last 600 to 610 s.")
    last_1h: WindowStats = Field(description="The last 3600 to 3660 s.")


class StoreGauges(Stats):
    """The block store of this host, as it reports itself. Counts are since the store started."""

    capacity_bytes: Count = Field(description="Size of the arena in bytes.")
    used_bytes: Count = Field(description="Bytes that hold blocks, committed or being written.")
    blocks: Count = Field(description="Committed blocks.")
    leased_blocks: Count = Field(default=0, description="Protected from eviction right now.")
    reserved_blocks: Count = Field(default=0, description="Being written, not visible yet.")
    lookups: Count = Field(default=0, description="Prefixes that were looked up.")
    hits: Count = Field(default=0, description="Lookups that found at least one block.")
    loads: Count = Field(default=0, description="Loads by engines.")
    loaded_blocks: Count = Field(default=0, description="Blocks that engines loaded.")
    loaded_bytes: Count = Field(default=0, description="Bytes that engines loaded.")
    saved_blocks: Count = Field(default=0, description="Blocks that engines saved.")
    saved_bytes: Count = Field(default=0, description="Bytes that engines saved.")
    verification_failures: Count = Field(
        default=0, description="Blocks refused because token ids or checksum did not agree."
    )
    refused_reservations: Count = Field(
        default=0, description="Blocks not saved because nothing could be evicted."
    )
    evicted_blocks: dict[str, Count] = Field(
        default_factory=dict, description="Evicted blocks by reason."
    )


class EventGauges(Stats):
    """The stream of KV events from one replica."""

    connected: bool = Field(description="Events or an answer arrived lately.")
    incarnation: Count = Field(default=0, description="Lives of the engine seen so far.")
    last_sequence: int | None = Field(
        default=None, description="Sequence number of the newest batch; null before the first."
    )
    batches: Count = Field(default=0, description="Batches received.")
    gaps: Count = Field(default=0, description="Breaks in the sequence numbers.")
    replays: Count = Field(default=0, description="Replays asked for after a gap or a start.")
    resyncs: Count = Field(default=0, description="Times the replica's blocks were forgotten.")
    undecodable: Count = Field(default=0, description="Messages that could not be decoded.")
    lag_s: Seconds | None = Field(
        default=None, description="Age in seconds of the newest batch when it was applied."
    )


class IndexGauges(Stats):
    """The gateway's radix index."""

    blocks: Count = Field(description="Blocks known.")
    used_bytes: Count = Field(description="Estimated size in bytes.")
    capacity_bytes: Count = Field(description="Bound in bytes.")


class MemoGauges(Stats):
    """The memo of rendered prefixes."""

    tokens_from_memo: Count = Field(description="Tokens that were not tokenized again.")
    tokens_tokenized: Count = Field(description="Tokens that went through the tokenizer.")
    used_bytes: Count = Field(default=0, description="Size in bytes.")
    capacity_bytes: Count = Field(default=0, description="Bound in bytes.")


class ReplicaGauges(Stats):
    """The state of one replica right now."""

    in_flight: Count = Field(default=0, description="Requests that this replica works on.")
    events: EventGauges | None = Field(
        default=None, description="Its KV events; null when none are subscribed."
    )


class Gauges(Stats):
    """The state of everything right now, handed to `Accounting.snapshot` by its caller."""

    in_flight: Count = Field(default=0, description="Requests that are with an engine.")
    waiting: Count = Field(default=0, description="Requests that wait for a place.")
    loop_lag_s: Seconds | None = Field(
        default=None, description="How late the event loop ran lately, in seconds."
    )
    store: StoreGauges | None = Field(
        default=None, description="The store; null when there is none or it does not answer."
    )
    index: IndexGauges | None = Field(default=None, description="The radix index.")
    memo: MemoGauges | None = Field(default=None, description="The memo of rendered prefixes.")
    replicas: dict[str, ReplicaGauges] = Field(default_factory=dict, description="By replica id.")


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
    total: ScopeStats = Field(description="All replicas, and requests that reached none.")
    without_replica: ScopeStats = Field(
        description="Requests that reached no replica, such as refused ones; part of total."
    )
    replicas: dict[str, ReplicaStats] = Field(description="By replica id.")
    store: StoreGauges | None = Field(description="The store; null when it does not answer.")
    index: IndexGauges | None = Field(description="The radix index.")
    memo: MemoGauges | None = Field(description="The memo of rendered prefixes.")

"""The state of everything right now, as its owners report it: part of GET /cache/stats.

The composition root fills these from the store, the event subscribers, the index and the renderer.
A default of None means that the owner does not say; nothing here defaults to 0.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0)]


class Stats(BaseModel):
    """A part of the statistics; never changes once made."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class TierGauges(Stats):
    """One tier of the store below its memory. Counts are since the store started."""

    name: str = Field(description="disk or redis.")
    capacity_bytes: Count = Field(description="What it may hold in bytes.")
    used_bytes: Count = Field(description="What it holds in bytes.")
    blocks: Count = Field(description="Blocks that it holds.")
    stored_blocks: Count = Field(description="Blocks that were written.")
    refused_blocks: Count = Field(description="Blocks that were not admitted, or had no room.")
    written_bytes: Count = Field(description="Bytes written.")
    read_bytes: Count = Field(description="Bytes read.")
    faults: Count = Field(description="Reads and writes that failed.")
    evicted_blocks: dict[str, Count] = Field(description="Blocks that went, by reason.")
    latency_s: Seconds | None = Field(
        description="Time in seconds before the first byte of a read, as measured lately; null "
        "before the first."
    )
    bandwidth_bytes_s: Annotated[float, Field(ge=0)] | None = Field(
        description="Bytes a second, as measured lately; null before the first transfer."
    )
    breaker: str | None = Field(
        description="closed: in use; open: left alone after faults; half_open: tried again. Null "
        "where there is none."
    )


class PolicyGauges(Stats):
    """The store's policies and the file that they come from."""

    reloads: Count = Field(description="Times a changed file was taken.")
    refused: Count = Field(description="Times one was not: the old settings stayed.")
    error: str | None = Field(description="Why the newest file was not taken; null when it was.")
    needs_restart: list[str] = Field(
        description="Keys of the newest file that take effect when the store starts again."
    )


class StoreGauges(Stats):
    """The block store of this host, as it reports itself. Counts are since the store started."""

    id: str = Field(description="Name of the store.")
    incarnation: Count = Field(description="Changes when the store restarts empty.")
    uptime_s: Seconds = Field(description="Seconds since the store started.")
    engines: list[str] = Field(description="Engines whose connector is connected.")
    capacity_bytes: Count = Field(description="Size of the arena in bytes.")
    used_bytes: Count = Field(description="Bytes of committed blocks.")
    reserved_bytes: Count = Field(description="Bytes that are being written.")
    blocks: Count = Field(description="Committed blocks.")
    leases: Count = Field(description="Leases that protect blocks right now.")
    leased_blocks: Count = Field(description="Blocks that are protected from eviction.")
    lookups: Count = Field(description="Prefixes that engines looked up.")
    asked_blocks: Count = Field(description="Blocks that were looked up.")
    matched_blocks: Count = Field(description="Blocks that were found.")
    loads: Count = Field(description="Loads that engines reported.")
    failed_loads: Count = Field(description="Loads that failed and were recomputed.")
    loaded_tokens: Count = Field(description="Tokens that engines loaded.")
    loaded_bytes: Count = Field(description="Bytes that engines loaded.")
    stored_blocks: Count = Field(description="Blocks that engines saved.")
    duplicate_blocks: Count = Field(
        description="Saved by two engines at the same time; the second copy was dropped."
    )
    orphaned_blocks: Count = Field(description="Not taken: their parent was gone.")
    refused_blocks: Count = Field(
        description="Not taken: everything else was leased or being written."
    )
    expired_leases: Count = Field(description="Leases that nobody gave back in time.")
    expired_reservations: Count = Field(description="Writes that nobody finished in time.")
    evicted_blocks: dict[str, Count] = Field(description="Blocks that went, by reason.")
    tiers: list[TierGauges] = Field(
        default_factory=list, description="Its tiers below memory, from the top."
    )
    policies: PolicyGauges | None = Field(
        default=None, description="Its policies, and whether the newest file is in force."
    )


class EventGauges(Stats):
    """A stream of KV events and what it announced. Counts are since the gateway started."""

    connected: bool = Field(description="Events, or an answer to a replay, arrived lately.")
    incarnation: Count | None = Field(
        default=None, description="Lives of the publisher that were seen."
    )
    last_sequence: int | None = Field(
        default=None, description="Sequence number of the newest batch; null before the first."
    )
    lag_s: Seconds | None = Field(
        default=None, description="Age in seconds of the newest batch when it was applied."
    )
    batches: Count | None = Field(default=None, description="Batches received.")
    gaps: Count | None = Field(default=None, description="Breaks in the sequence numbers.")
    replays: Count | None = Field(default=None, description="Replays asked for.")
    resyncs: Count | None = Field(
        default=None, description="Times everything known of the publisher was forgotten."
    )
    malformed: Count | None = Field(
        default=None, description="Messages and events that could not be understood."
    )
    blocks: Count | None = Field(default=None, description="Blocks that it has now.")
    orphaned_blocks: Count | None = Field(
        default=None, description="Blocks below a parent that was never announced."
    )
    refused_blocks: Count | None = Field(
        default=None,
        description="Blocks of another size than the gateway's: they can never be matched.",
    )
    refused_block_size_tokens: int | None = Field(
        default=None, description="The size of those, in tokens."
    )
    overflow_blocks: Count | None = Field(
        default=None, description="Blocks left out since there were too many."
    )
    foreign_events: Count | None = Field(
        default=None,
        description="Events of media or KV cache groups that nothing here can reuse; ignored.",
    )


class SideGauges(Stats):
    """Work beside the requests. Counts are since the gateway started."""

    done: Count = Field(description="What was done.")
    waiting: Count = Field(description="What waits right now.")
    dropped: Count = Field(description="What came faster than it could be done.")
    failed: Count = Field(description="What could not be done.")


class IndexGauges(Stats):
    """The gateway's radix index."""

    blocks: Count = Field(description="Blocks known, resident or only seen.")
    used_bytes: Count = Field(description="Estimated size in bytes.")
    capacity_bytes: Count = Field(description="Bound in bytes.")
    forgotten_resident_blocks: Count | None = Field(
        default=None,
        description="Blocks dropped although somebody has them: the index is too small.",
    )


class MemoGauges(Stats):
    """The memo of rendered prefixes. Counts are since the gateway started."""

    tokens_from_memo: Count = Field(description="Tokens that were not tokenized again.")
    tokens_tokenized: Count = Field(description="Tokens that went through the tokenizer.")
    used_bytes: Count = Field(description="Size in bytes.")
    capacity_bytes: Count | None = Field(default=None, description="Bound in bytes.")


class ReplicaGauges(Stats):
    """The state of one replica right now."""

    url: str | None = Field(default=None, description="Where it answers.")
    model: str | None = Field(default=None, description="The base model that it serves.")
    condition: str | None = Field(default=None, description="starting, ready, ejected or draining.")
    reason: str | None = Field(default=None, description="Why, in one sentence.")
    condition_age_s: Seconds | None = Field(
        default=None, description="Seconds since it came into this condition."
    )
    ejections: Count | None = Field(default=None, description="Times it was ejected.")
    share: float | None = Field(
        default=None, description="Of the requests that it may get; below 1 in a slow start."
    )
    in_flight: Count | None = Field(
        default=None, description="Requests that this replica works on."
    )
    waiting: Count | None = Field(
        default=None, description="Requests that wait here for a place at it."
    )
    engine_running: Count | None = Field(
        default=None, description="Requests that it computes for, other gateways' too."
    )
    engine_waiting: Count | None = Field(
        default=None, description="Requests without a first token, other gateways' too."
    )
    kv_free: float | None = Field(
        default=None, description="Share of its KV memory that no running request holds."
    )
    evidence: str | None = Field(
        default=None,
        description="How well it is known what it holds: exact (from its events) or approximate "
        "(from what was sent to it).",
    )
    events: EventGauges | None = Field(
        default=None, description="Its KV events; null when none are subscribed."
    )


class CandidateStats(Stats):
    """A replica in a decision."""

    replica: str = Field(description="Its id.")
    score: float = Field(description="What the policy made of it; lower is better.")
    device_tokens: Count = Field(description="Tokens of the prompt in its own cache.")
    stored_tokens: Count = Field(description="Tokens beyond those that its store can load.")
    queue_s: Seconds = Field(description="Expected wait before the engine begins.")
    load_s: Seconds = Field(description="Expected time to load the stored tokens.")
    prefill_s: Seconds = Field(description="Expected time to compute the rest.")
    running: Count = Field(description="Requests with a first token.")
    waiting: Count = Field(description="Requests without one.")
    kv_free: float | None = Field(description="Free share of its KV memory, where it says so.")
    evidence: str = Field(description="exact, approximate or fallback.")


class DecisionStats(Stats):
    """One routing decision."""

    request_id: str = Field(description="Of the request.")
    replica: str = Field(description="Where it went.")
    kind: str = Field(description="The routing policy.")
    reason: str = Field(description="Why this one is best.")
    evidence: str = Field(description="What was known of it: exact, approximate or fallback.")
    num_tokens: Count = Field(description="Of the prompt; 0 where it is not known.")
    attempt: Count = Field(description="1 for the first replica that was asked.")
    waited_s: Seconds = Field(
        description="Seconds for a prefix that another request was computing, and for a place."
    )
    candidates: list[CandidateStats] = Field(description="Best first; at most 16.")


class RoutingGauges(Stats):
    """How requests found their replicas. Counts are since the gateway started."""

    kind: str = Field(description="The routing policy.")
    by_evidence: dict[str, Count] = Field(
        description="Decisions by what was known of the replica: exact, approximate, fallback."
    )
    by_reason: dict[str, Count] = Field(description="Decisions by the policy's reason.")
    retries: dict[str, Count] = Field(
        description="Further attempts at another replica, by what went wrong before."
    )
    joined: Count = Field(
        description="Requests that waited for a prefix which another one was computing."
    )
    recent: list[DecisionStats] = Field(description="The newest decisions, newest first.")


class Gauges(Stats):
    """The state of everything right now, handed to `Accounting.snapshot` by its caller."""

    in_flight: Count = Field(description="Requests that are with an engine.")
    waiting: Count = Field(description="Requests that wait for a place.")
    loop_lag_s: Seconds | None = Field(
        default=None, description="How late the event loop ran lately, in seconds."
    )
    store: StoreGauges | None = Field(
        default=None, description="The store; null when there is none or it does not answer."
    )
    store_events: EventGauges | None = Field(
        default=None, description="The store's KV events; null when none are subscribed."
    )
    remote_stores: dict[str, EventGauges] = Field(
        default_factory=dict, description="KV events of other hosts' stores, by id."
    )
    routing: RoutingGauges | None = Field(
        default=None, description="How requests found their replicas."
    )
    index: IndexGauges | None = Field(default=None, description="The radix index.")
    memo: MemoGauges | None = Field(default=None, description="The memo of rendered prefixes.")
    outcomes: SideGauges | None = Field(
        default=None, description="Ends of answers that the store was told; null without a store."
    )
    request_log: SideGauges | None = Field(
        default=None, description="Lines of the request log; null where it is off."
    )
    replicas: dict[str, ReplicaGauges] = Field(default_factory=dict, description="By replica id.")

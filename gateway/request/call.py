"""One request while it runs: collects what its record will say."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from engine_adapter.base import Prompt
from gateway.accounts.record import FirstToken, Outcome, PromptTokens, RequestRecord
from gateway.fleet.assignment import Assignment
from gateway.request.answer import EngineMetrics, Usage
from gateway.request.stop import stop_of
from policies.access import Stop
from policies.routing.work import Observed, Work
from prefix_store.events import BlocksLoaded
from prefix_store.protocol import Facts
from prefix_store.residency import Match

NO_FACTS = Facts()


@dataclass(slots=True)
class Call:
    """Filled step by step along the straight line; times are of time.perf_counter()."""

    request_id: str
    block_size: int = 1
    """Of the model's replicas, in tokens."""
    started_at: float = field(default_factory=time.time)
    began: float = field(default_factory=time.perf_counter)
    """When the body was complete."""
    tenant: str = ""
    salt: str = field(default="", repr=False)
    """The tenant's: keys what is written down of its clients' words."""
    model: str = ""
    stream: bool = False
    explain: bool = False
    """The client wants to know how its replica was chosen."""
    prompt: Prompt | None = None
    unrendered: bool = False
    match: Match | None = None
    """When the replica was chosen."""
    facts: Facts = NO_FACTS
    assignment: Assignment | None = None
    """Of the replica that was asked last."""
    report_id: str | None = None
    """Under which the engine's connector reports loads of this request; None without a store."""
    sent: float | None = None
    """When the request went to the engine."""
    first_token: float | None = None
    finished: float = 0.0
    """When the answer was out."""
    usage: Usage | None = None
    metrics: EngineMetrics | None = None
    finish_reason: str | None = None
    """As the engine says it, of the first answer that ended."""
    status: int = 200
    outcome: Outcome = Outcome.CANCELLED
    """Until something else is known: a client may leave at any moment."""

    def body_complete(self) -> None:
        """From here on its time counts."""
        self.started_at = time.time()
        self.began = time.perf_counter()

    def ended(self, outcome: Outcome, status: int) -> None:
        """How it ended; the status is the one that the client got."""
        self.outcome = outcome
        self.status = status

    def assigned(self, assignment: Assignment, report_id: str | None) -> None:
        """A replica is asked; what an earlier one said does not count."""
        self.assignment, self.report_id = assignment, report_id
        self.match = assignment.match
        self.sent = self.first_token = None
        self.usage = self.metrics = self.finish_reason = None

    @property
    def replica(self) -> str | None:
        """Id of the replica that was asked last."""
        return None if self.assignment is None else self.assignment.replica.id

    @property
    def stop(self) -> Stop:
        """How its answer ended."""
        return stop_of(self.finish_reason, self.outcome)

    @property
    def output_tokens(self) -> int:
        """As the engine reports them; 0 where it was not asked to the end."""
        return (self.usage.completion_tokens or 0) if self.usage else 0

    @property
    def predicted_tokens(self) -> int:
        """Tokens that should be reused on the path chosen."""
        return self._reusable(self.assignment.captured_blocks if self.assignment else 0)

    @property
    def lacks_report(self) -> bool:
        """More was reused than the device was known to have, so that the connector must have
        loaded it, unless the index is behind. Call it while there is no report."""
        return (
            self.outcome is Outcome.OK
            and self.report_id is not None
            and self._cached_tokens > self.device_tokens
        )

    def record(self, loaded: BlocksLoaded | None) -> RequestRecord:
        """The record, to be made once, at the end."""
        prompt = self._prompt_tokens(loaded)
        usage = self.usage
        return RequestRecord(
            request_id=self.request_id,
            tenant=self.tenant,
            model=self.model,
            replica=self.replica,
            outcome=self.outcome,
            status=self.status,
            stream=self.stream,
            started_at=self.started_at,
            duration_s=self.finished - self.began,
            prompt=prompt,
            first_token=self._first_token(),
            output_tokens=self.output_tokens,
            load_s=loaded.duration_s if loaded is not None else 0.0,
            rendering_mismatch=(
                usage is not None
                and self.prompt is not None
                and usage.prompt_tokens != self.prompt.num_tokens
            ),
            unrendered=self.unrendered,
        )

    def observed(self, loaded: BlocksLoaded | None) -> Observed | None:
        """What it took, for the estimate of its replica; None where that is not known."""
        if self.outcome is not Outcome.OK or self.usage is None or self.metrics is None:
            return None
        if loaded is None and self.lacks_report:
            return None  # a load whose time is not known would count as computing
        cached = self._cached_tokens
        load_s = loaded.duration_s if loaded is not None else 0.0
        queue_s = _seconds(self.metrics.queue_time_ms)
        ttft_s = None
        if self.first_token is not None and self.sent is not None:
            ttft_s = self.first_token - self.sent
        return Observed(
            Work(
                uncached_tokens=max(1, self.usage.prompt_tokens - cached),
                stored_tokens=loaded.num_tokens if loaded is not None else 0,
                context_tokens=cached,
            ),
            # Until a load has ended the engine counts its request as waiting.
            queue_s=None if queue_s is None else max(0.0, queue_s - load_s),
            load_s=load_s,
            prefill_s=_seconds(self.metrics.time_to_first_token_ms),
            ttft_s=ttft_s,
        )

    def _prompt_tokens(self, loaded: BlocksLoaded | None) -> PromptTokens | None:
        if self.usage is None and self.prompt is None:
            return None
        cached = self._cached_tokens
        # Cached as the engine counts it: its own blocks and all that a load promised. What failed
        # to load is computed, so it is reused from nowhere.
        promised = min(loaded.promised_tokens, cached) if loaded is not None else 0
        stored = min(loaded.num_tokens, promised) if loaded is not None else 0
        # The runs of the tiers follow one another: memory, disk, Redis.
        redis = min(loaded.redis_tokens, stored) if loaded is not None else 0
        disk = min(loaded.disk_tokens, stored - redis) if loaded is not None else 0
        match = self.match
        return PromptTokens(
            total=self.usage.prompt_tokens if self.usage else self._num_tokens,
            seen=self._reusable(match.seen_blocks if match else 0),
            available=self._reusable(match.available_blocks if match else 0),
            captured=self.predicted_tokens,
            delivered_device=cached - promised,
            delivered_memory=stored - disk - redis,
            delivered_disk=disk,
            delivered_redis=redis,
            unattributed=(
                cached - self.device_tokens if loaded is None and self.lacks_report else 0
            ),
        )

    @property
    def _cached_tokens(self) -> int:
        """As the engine reports them."""
        return (self.usage.cached_tokens or 0) if self.usage else 0

    @property
    def device_tokens(self) -> int:
        """That the engine's own cache was known to have."""
        return self._reusable(self.assignment.device_blocks if self.assignment else 0)

    @property
    def _num_tokens(self) -> int:
        return self.prompt.num_tokens if self.prompt else 0

    def _reusable(self, num_blocks: int) -> int:
        """Tokens of the first `num_blocks` blocks that an engine can reuse: it computes the last
        token of a prompt always, so a block that ends with it brings nothing."""
        most = max(0, self._num_tokens - 1) // self.block_size
        return min(num_blocks, most) * self.block_size

    def _first_token(self) -> FirstToken | None:
        """For an answer in one piece, time to first token is the sum of its measured parts, and
        None without the engine's; the delivery of a single token cannot be seen there."""
        if self.sent is None:
            return None
        gateway_s = self.sent - self.began
        queue_s = _seconds(self.metrics.queue_time_ms) if self.metrics else None
        prefill_s = _seconds(self.metrics.time_to_first_token_ms) if self.metrics else None
        known = queue_s is not None and prefill_s is not None
        engine_s = (queue_s or 0.0) + (prefill_s or 0.0)
        if self.first_token is not None:
            ttft_s = self.first_token - self.began
            delivery_s = max(0.0, ttft_s - gateway_s - engine_s) if known else None
            return FirstToken(ttft_s, gateway_s, queue_s, prefill_s, delivery_s)
        if self.stream or not known:
            return None
        return FirstToken(gateway_s + engine_s, gateway_s, queue_s, prefill_s, None)


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000.0

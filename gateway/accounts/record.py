"""What is known of one request when it has ended: the unit of all accounting."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Outcome(enum.StrEnum):
    """How a request ended."""

    OK = "ok"
    CANCELLED = "cancelled"
    """The client went away first."""
    REFUSED = "refused"
    """Bad input, as the gateway or the engine (4xx) judged it, or no place."""
    ENGINE_ERROR = "engine_error"
    """The engine answered with a 5xx, with an error in the middle of a stream, or not at all."""


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """The waterfall of one prompt, in tokens. available >= captured >= delivered in the mean."""

    total: int
    """As the engine reports it; our own count where the engine reported nothing."""
    seen: int
    """In full blocks that somebody has computed before, wherever they are now."""
    available: int
    """In blocks resident anywhere when the request arrived."""
    captured: int
    """In blocks resident on the path chosen: the replica's device or the store on its host."""
    delivered_device: int
    """Really reused from the engine's own cache, as the engine reports."""
    delivered_memory: int
    """Really loaded from the store's memory tier, as the engine's connector reports."""
    delivered_disk: int = 0
    """Likewise from its disk tier."""
    delivered_redis: int = 0
    """Likewise from its Redis tier."""
    unattributed: int = 0
    """Part of delivered_device that the device was not known to have while no load was reported:
    it may have come from the store."""

    @property
    def delivered(self) -> int:
        return (
            self.delivered_device
            + self.delivered_memory
            + self.delivered_disk
            + self.delivered_redis
        )


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Time to first token and its parts, in seconds; a part is None when the engine is silent.

    The first token of an answer that is not streamed cannot be seen: there, `ttft_s` is gateway +
    queue + prefill as measured, a lower bound, and `delivery_s` is None.
    """

    ttft_s: float
    """From the end of the request's body to the first token (not the role chunk)."""
    gateway_s: float
    """Until the request was on its way to the engine."""
    queue_s: float | None
    """In the engine until it was scheduled; loads of stored blocks count here."""
    prefill_s: float | None
    """From scheduling to the first token, as the engine measured it."""
    delivery_s: float | None
    """The rest: sockets, the engine's HTTP front end, serialisation."""


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One finished request."""

    request_id: str
    tenant: str
    model: str
    replica: str | None
    """None when no replica was chosen."""
    outcome: Outcome
    status: int
    """HTTP status that the client got (or would have got)."""
    stream: bool
    started_at: float
    """time.time() when the body was complete."""
    duration_s: float
    prompt: PromptTokens | None
    """None when the prompt was never rendered and the engine reported nothing."""
    first_token: FirstToken | None
    output_tokens: int
    load_s: float = 0.0
    """Seconds that loading stored blocks took, as the engine's connector reports; also of loads
    that failed."""
    rendering_mismatch: bool = False
    """Our prompt length differs from the one that the engine reports."""
    unrendered: bool = False
    """The prompt could not be rendered here (images, a template of the client's own, ...)."""

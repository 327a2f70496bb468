"""A sequence of a simulated engine (engine_adapter.simulated): one prompt and its answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from engine_adapter.simulated.cache import Block
from prefix_store.base import BlockHash
from prefix_store.hashing import TokenIds, digest, extend_chain


@dataclass(frozen=True, slots=True)
class Job:
    """What is asked for. Token ids are those on the wire."""

    prompt: TokenIds
    answer: TokenIds
    """The tokens that will be generated; at least one."""
    salt: str = ""
    adapter: str | None = None
    adapter_number: int | None = None
    priority: int = 0
    """Lower first, where the engine schedules by priority."""
    streams: bool = False
    """Somebody waits for every token and not only for the last."""
    reports_reused: bool = False
    """kv_cache_report_mode "full": reused blocks are announced again."""


def nobody(sequence: Sequence, now: float) -> None:
    """Nobody listens."""


@dataclass(slots=True, eq=False)
class Sequence:
    """Counts of tokens are those of the model: a wire token stands for `scale` of them. Times are
    of the simulated clock, in seconds."""

    job: Job
    arrived_at: float
    number: int
    """Order of arrival."""
    scale: int
    token_ids: TokenIds
    """Prompt and answer, on the wire."""
    hashes: list[BlockHash]
    """Of all full blocks of prompt and answer."""
    num_prompt: int
    num_answer: int
    progressed: Callable[[Sequence, float], None] = nobody
    """Called after every step that brought it tokens."""
    num_generated: int = 0
    num_computed: int = 0
    """Tokens from the start whose KV is there, or will be at the end of the running step."""
    num_named: int = 0
    """Blocks from the start that can be found by others."""
    blocks: list[Block] = field(default_factory=list)
    cached_tokens: int | None = None
    """Wire tokens that need not be computed, at the first scheduling."""
    scheduled_at: float | None = None
    first_token_at: float | None = None
    finished_at: float | None = None
    preemptions: int = 0

    @classmethod
    def of(
        cls, job: Job, *, arrived_at: float, number: int, scale: int, block_size: int
    ) -> Sequence:
        """A sequence that has not been scheduled yet."""
        token_ids = np.concatenate((job.prompt, job.answer))
        root = digest("simulated-engine-1", job.adapter or "", job.salt)
        return cls(
            job=job,
            arrived_at=arrived_at,
            number=number,
            scale=scale,
            token_ids=token_ids,
            hashes=extend_chain(root, token_ids, block_size),
            num_prompt=scale * job.prompt.size,
            num_answer=scale * job.answer.size,
        )

    @property
    def num_tokens(self) -> int:
        """Known so far."""
        return self.num_prompt + self.num_generated

    @property
    def num_remaining(self) -> int:
        """Still to be generated."""
        return self.num_answer - self.num_generated

    @property
    def wire_tokens(self) -> int:
        """Tokens of the answer that are out: the first with the first token of the model."""
        return -(-self.num_generated // self.scale)

    @property
    def steps_to_next_wire_token(self) -> int:
        """Tokens to generate until wire_tokens grows, or the answer is complete."""
        return min(self.num_remaining, self.wire_tokens * self.scale - self.num_generated + 1)

    @property
    def is_finished(self) -> bool:
        return self.finished_at is not None

"""What bench.routing compares with: one cache as large as those of all replicas together, which
gets the requests one after the other. No fleet can reuse much more; its work is what load levels
are measured in."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bench.routing_trace import TOKENS_PER_WIRE_TOKEN, WIRE_BLOCK_TOKENS, WireRequest, Workload
from engine_adapter.simulated.cache import BlockCache
from engine_adapter.simulated.sequence import Job, Sequence
from engine_adapter.simulated.timing import StepTiming, StepWork
from prefix_store.base import BlockHash
from prefix_store.hashing import as_token_ids

CAPACITY_SHARE = 0.5
"""KV memory of the whole fleet, of the slice's distinct tokens: tight, as in practice."""
DECODE_BATCH = 8
"""Sequences among which a step's fixed time is thought to be shared."""


@dataclass(frozen=True, slots=True)
class Reference:
    """One big cache."""

    hit_rate: float
    """Tokens reused, of all prompt tokens."""
    late_hit_rate: float
    """Of those in the second half of the slice."""
    work_s: float
    """Simulated seconds of engine time that its requests take."""


def blocks_of_fleet(workload: Workload) -> int:
    """KV blocks of all replicas together."""
    return int(workload.distinct_tokens * CAPACITY_SHARE) // WIRE_BLOCK_TOKENS


def one_big_cache(workload: Workload, num_blocks: int, timing: StepTiming) -> Reference:
    """Replay a workload into the simulated engine's own cache."""
    cache = BlockCache(num_blocks, _forgotten)
    reused: list[int] = []
    work_s = 0.0
    for number, request in enumerate(workload.requests):
        tokens = _pass(cache, request, number)
        reused.append(tokens)
        work_s += engine_seconds(request, tokens, timing)
    lengths = [len(request.token_ids) for request in workload.requests]
    half = len(lengths) // 2
    return Reference(sum(reused) / sum(lengths), sum(reused[half:]) / sum(lengths[half:]), work_s)


def engine_seconds(request: WireRequest, reused: int, timing: StepTiming) -> float:
    """What a request takes of an engine that reuses so many wire tokens of it: what it adds to
    each step, and its share of what a step takes anyway."""
    scale = TOKENS_PER_WIRE_TOKEN
    prompt, answer = scale * len(request.token_ids), scale * request.output_tokens
    prefill = StepWork()
    prefill.add_prefill(scale * reused, prompt - scale * reused)
    decode = StepWork(decodes=answer, positions=answer * (prompt + answer // 2))
    together = timing.first_step_s(prefill) + timing.first_step_s(decode) - timing.base_s
    return together + timing.base_s * answer / DECODE_BATCH


def _pass(cache: BlockCache, request: WireRequest, number: int) -> int:
    """One request alone in the cache; the wire tokens that it reuses."""
    size = WIRE_BLOCK_TOKENS
    answer = np.full(request.output_tokens, number, dtype="<i4")  # nobody asks for it again
    job = Job(as_token_ids(request.token_ids), answer)
    sequence = Sequence.of(job, arrived_at=0.0, number=number, scale=1, block_size=size)
    found = cache.find(sequence.hashes, (len(request.token_ids) - 1) // size)
    cache.use(found)
    needed = -(-(len(request.token_ids) + request.output_tokens) // size) - len(found)
    new = cache.take(min(needed, cache.num_free))
    for block, block_hash in zip(new, sequence.hashes[len(found) :], strict=False):
        cache.name(block, block_hash)
    cache.release([*found, *new])
    return len(found) * size


def _forgotten(block_hash: BlockHash) -> None:
    """Nobody needs to know."""

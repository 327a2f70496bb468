"""The simulated engine's scheduler and vLLM's own, side by side on random histories.

Equal: the tokens of every sequence in every step, cached tokens, preemptions, and KV events in
their order. No model runs, so this needs vLLM but no engine process.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engine_adapter.simulated.events import EventLog
from engine_adapter.simulated.limits import SchedulerLimits
from engine_adapter.simulated.scheduler import Scheduler
from engine_adapter.simulated.sequence import Job, Sequence
from engine_adapter.simulated.timing import StepTiming
from prefix_store.hashing import as_token_ids

# Of torch and vLLM, at import and in its configuration.
pytestmark = pytest.mark.filterwarnings("ignore")

BLOCK = 32
A_SECOND_A_STEP = StepTiming(1.0, 0.0, 0.0, 0.0, 0.0)
HISTORIES = 40


@dataclass(frozen=True)
class Setting:
    """Of both schedulers; one block more than the sequences can use, which vLLM keeps."""

    blocks: int
    batched_tokens: int
    sequences: int
    policy: str


@dataclass(frozen=True)
class Arrival:
    """A request, and when it comes and goes, in steps."""

    at: int
    prompt: list[int]
    answer: list[int]
    salt: str
    priority: int
    leaves_after: int | None
    reports_reused: bool


class VllmSide:
    """vLLM's scheduler, with a model that answers what it is told to."""

    def __init__(self, setting: Setting, model_dir: Path, arrivals: list[Arrival]) -> None:
        self._arrivals = arrivals
        self._scheduler = _vllm_scheduler(setting, model_dir)
        self._hasher = _block_hasher()
        self._requests: dict[str, Any] = {}
        self._output: Any = None
        self.cached: dict[int, int] = {}
        self.events: list[Any] = []

    @property
    def is_idle(self) -> bool:
        return not (self._scheduler.running or self._scheduler.waiting)

    @property
    def preemptions(self) -> int:
        return sum(request.num_preemptions for request in self._requests.values())

    def add(self, number: int) -> None:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        one = self._arrivals[number]
        mode = {"kv_cache_report_mode": "full"} if one.reports_reused else None
        request = Request(
            request_id=str(number),
            prompt_token_ids=one.prompt,
            sampling_params=SamplingParams(
                max_tokens=len(one.answer), ignore_eos=True, extra_args=mode
            ),
            pooling_params=None,
            cache_salt=one.salt or None,
            priority=one.priority,
            block_hasher=self._hasher,
            arrival_time=float(number),
        )
        self._requests[request.request_id] = request
        self._scheduler.add_request(request)

    def abort(self, number: int) -> None:
        from vllm.v1.request import RequestStatus

        if str(number) in self._scheduler.requests:
            self._scheduler.finish_requests(str(number), RequestStatus.FINISHED_ABORTED)

    def begin(self) -> dict[int, int]:
        """Tokens of each request in the next step."""
        self._output = self._scheduler.schedule()
        while not self._output.num_scheduled_tokens:  # it only made room
            self.end()
            self._output = self._scheduler.schedule()
        return {int(name): count for name, count in self._output.num_scheduled_tokens.items()}

    def end(self) -> None:
        from vllm.v1.outputs import ModelRunnerOutput

        names = list(self._output.num_scheduled_tokens)
        self._take_events()
        result = self._scheduler.update_from_output(
            self._output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: i for i, name in enumerate(names)},
                sampled_token_ids=[self._sampled(name) for name in names],
            ),
        )
        self._take_events()
        for outputs in result.values():
            for output in outputs.outputs:
                if output.prefill_stats is not None:
                    cached = output.prefill_stats.num_cached_tokens
                    self.cached[int(output.request_id)] = cached

    def _sampled(self, name: str) -> list[int]:
        request = self._requests[name]
        is_complete = request.num_computed_tokens >= request.num_tokens
        if name not in self._scheduler.requests or not is_complete:
            return []
        return [self._arrivals[int(name)].answer[len(request.output_token_ids)]]

    def _take_events(self) -> None:
        self.events += self._scheduler.kv_cache_manager.take_events()


class OurSide:
    """The simulated scheduler; a step takes a second, and requests come and go within steps."""

    def __init__(self, setting: Setting, arrivals: list[Arrival]) -> None:
        self._arrivals = arrivals
        self._log = EventLog(BLOCK, enabled=True)
        limits = SchedulerLimits(
            num_blocks=setting.blocks - 1,
            block_size=BLOCK,
            max_batched_tokens=setting.batched_tokens,
            max_sequences=setting.sequences,
            by_priority=setting.policy == "priority",
        )
        self._scheduler = Scheduler(limits, A_SECOND_A_STEP, self._log)
        self._sequences: dict[int, Sequence] = {}
        self._now = 0.0
        self.events: list[Any] = []

    @property
    def is_idle(self) -> bool:
        return self._scheduler.due_at is None

    @property
    def preemptions(self) -> int:
        return self._scheduler.counters.preemptions

    @property
    def cached(self) -> dict[int, int | None]:
        return {
            number: sequence.cached_tokens
            for number, sequence in self._sequences.items()
            if sequence.first_token_at is not None
        }

    def add(self, number: int) -> None:
        one = self._arrivals[number]
        wanted = Job(
            as_token_ids(one.prompt),
            as_token_ids(one.answer),
            salt=one.salt,
            priority=one.priority,
            streams=True,
            reports_reused=one.reports_reused,
        )
        self._sequences[number] = self._scheduler.add(wanted, self._within_the_step)

    def abort(self, number: int) -> None:
        self._scheduler.abort(self._sequences[number], self._within_the_step)

    def begin(self) -> dict[int, int]:
        """Tokens of each request in the running step."""
        numbers = {sequence: number for number, sequence in self._sequences.items()}
        return {numbers[sequence]: count for sequence, count in self._scheduler.scheduled()}

    def end(self) -> None:
        due_at = self._scheduler.due_at
        if due_at is not None:
            self._now = due_at
            self._scheduler.advance(due_at)
        self.events += self._log.take()

    @property
    def _within_the_step(self) -> float:
        due_at = self._scheduler.due_at
        return self._now if due_at is None else due_at - 0.5


def run(side: VllmSide | OurSide, arrivals: list[Arrival]) -> Iterator[tuple[int, dict[int, int]]]:
    """One step after the other: what was scheduled in each."""
    waiting = list(range(len(arrivals)))
    present: dict[int, int] = {}
    step = 0
    while waiting or not side.is_idle:
        if side.is_idle:  # the first one starts a step, the others come while it runs
            step = max(step, arrivals[waiting[0]].at)
            present[waiting[0]] = step
            side.add(waiting.pop(0))
        scheduled = side.begin()
        while waiting and arrivals[waiting[0]].at <= step:
            present[waiting[0]] = step
            side.add(waiting.pop(0))
        for number, since in list(present.items()):
            leaves_after = arrivals[number].leaves_after
            if leaves_after is not None and step - since >= leaves_after:
                del present[number]
                side.abort(number)
        side.end()
        yield step, scheduled
        step += 1


def random_history(chooser: random.Random, setting: Setting) -> list[Arrival]:
    """Prompts that share prefixes, some that end with a block, some that fill the cache."""
    trunks = [[chooser.randrange(300, 40_000) for _ in range(400)] for _ in range(3)]
    arrivals = []
    for _ in range(chooser.randrange(3, 25)):
        length = chooser.randrange(1, BLOCK * 10)
        if chooser.random() < 0.3:
            length = max(BLOCK, length // BLOCK * BLOCK)
        shared = length if chooser.random() < 0.3 else chooser.randrange(length + 1)
        prompt = chooser.choice(trunks)[:shared]
        prompt += [chooser.randrange(300, 40_000) for _ in range(length - shared)]
        answer = [chooser.randrange(300, 40_000) for _ in range(chooser.randrange(1, 60))]
        arrivals.append(
            Arrival(
                at=chooser.randrange(120),
                prompt=prompt[: (setting.blocks - 2) * BLOCK - len(answer) - 1],
                answer=answer,
                salt=chooser.choice(["", "", "s"]),
                priority=chooser.randrange(3),
                leaves_after=chooser.randrange(1, 80) if chooser.random() < 0.15 else None,
                reports_reused=chooser.random() < 0.2,
            )
        )
    return sorted(arrivals, key=lambda arrival: arrival.at)


def comparable(events: list[Any]) -> list[tuple[Any, ...]]:
    """What is equal although the hashes are of different kinds: they are numbered as they come."""
    names: dict[Any, int] = {}

    def name(block_hash: Any) -> int:
        return names.setdefault(block_hash, len(names))

    result: list[tuple[Any, ...]] = []
    for event in events:
        kind = type(event).__name__
        fields: tuple[Any, ...] = ()
        if kind == "BlockStored":
            parent = event.parent_block_hash
            keys = [list(each) if each else None for each in event.extra_keys]
            fields = (
                None if parent is None else name(parent), list(event.token_ids), keys,
                event.block_size, event.medium, event.lora_id, event.lora_name, event.group_idx,
            )  # fmt: skip
        if kind != "AllBlocksCleared":
            fields += (event.medium, [name(block_hash) for block_hash in event.block_hashes])
        result.append((kind, *fields))
    return result


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_schedules_and_events_equal_vllms(model_dir: Path, policy: str) -> None:
    """For queues, chunks, salts, evictions, preemptions, reports and clients that leave."""
    preemptions = removed = 0
    for seed in range(HISTORIES):
        chooser = random.Random(f"{policy}/{seed}")
        setting = Setting(
            blocks=chooser.choice([16, 24, 40, 100]),
            batched_tokens=chooser.choice([48, 64, 100, 256, 512]),
            sequences=chooser.choice([2, 4, 8]),
            policy=policy,
        )
        arrivals = random_history(chooser, setting)
        vllm, ours = VllmSide(setting, model_dir, arrivals), OurSide(setting, arrivals)
        assert list(run(ours, arrivals)) == list(run(vllm, arrivals)), f"seed {seed}"
        assert ours.cached == vllm.cached, f"seed {seed}"
        assert ours.preemptions == vllm.preemptions, f"seed {seed}"
        assert comparable(ours.events) == comparable(vllm.events), f"seed {seed}"
        preemptions += vllm.preemptions
        removed += sum(1 for event in vllm.events if type(event).__name__ == "BlockRemoved")
    assert preemptions > 10
    assert removed > 500


def _block_hasher() -> Any:
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

    init_none_hash(sha256)
    return get_request_block_hasher(BLOCK, sha256)


def _vllm_scheduler(setting: Setting, model_dir: Path) -> Any:
    import torch
    from vllm.config import CacheConfig, KVEventsConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.v1.core.sched.scheduler import Scheduler as VllmScheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=True)
    cache.num_gpu_blocks = setting.blocks
    config = VllmConfig(
        model_config=ModelConfig(model=str(model_dir), dtype="bfloat16", max_model_len=4096),
        cache_config=cache,
        scheduler_config=SchedulerConfig(
            max_num_seqs=setting.sequences,
            max_num_batched_tokens=setting.batched_tokens,
            max_model_len=4096,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=False,
            policy=setting.policy,
        ),
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
    )
    attention = FullAttentionSpec(
        block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    return VllmScheduler(
        config,
        KVCacheConfig(setting.blocks, [], [KVCacheGroupSpec(["layer"], attention)]),
        StructuredOutputManager(config),
        block_size=BLOCK,
        hash_block_size=BLOCK,
        log_stats=True,
    )

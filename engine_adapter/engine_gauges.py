"""The few numbers of an engine's /metrics that say how busy it is.

The page (Prometheus text format, 50 to 200 KB) is read from every replica every second, so it is
searched for the wanted names and not parsed. What is absent or unreadable is None.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from policies.routing.engine_load import EngineLoad

_RUNNING = b"vllm:num_requests_running"
_WAITING = b"vllm:num_requests_waiting"
_KV_USAGE = b"vllm:kv_cache_usage_perc"
_CACHE_CONFIG = b"vllm:cache_config_info{"
_GENERATED = b"vllm:generation_tokens_total"
_STARTED = b"process_start_time_seconds"

_INTEGER_LABELS = re.compile(rb'[{,](kv_cache_size_tokens|num_gpu_blocks|block_size)="(\d+)"')


@dataclass(frozen=True, slots=True)
class EngineGauges:
    """Sums over the data-parallel ranks behind one server."""

    running: int | None = None
    """Requests in its batches."""
    waiting: int | None = None
    kv_free: float | None = None
    """Share of its KV memory, 0 to 1; the mean over its ranks."""
    generated_tokens: float | None = None
    """Since it started."""
    started_at: float | None = None
    """Unix time at which the server process started; absent with several API servers."""
    kv_tokens: int | None = None
    """That its KV memory holds, over all ranks."""
    kv_blocks: int | None = None
    """Blocks of its KV memory, over all ranks."""

    @classmethod
    def parse(cls, page: bytes) -> EngineGauges:
        """From the body of GET /metrics."""
        usage = list(_values(page, _KV_USAGE))
        configs = list(_cache_configs(page))
        return cls(
            running=_count(page, _RUNNING),
            waiting=_count(page, _WAITING),
            kv_free=min(1.0, max(0.0, 1.0 - sum(usage) / len(usage))) if usage else None,
            kv_tokens=sum(map(_tokens_of, configs)) or None,
            kv_blocks=sum(map(_blocks_of, configs)) or None,
            generated_tokens=_sum(page, _GENERATED),
            started_at=_sum(page, _STARTED),
        )

    @property
    def load(self) -> EngineLoad | None:
        """For the estimate of its waiting times; None where it does not say how many requests it
        has."""
        if self.running is None or self.waiting is None:
            return None
        return EngineLoad(self.running, self.waiting, self.kv_free, self.kv_tokens)

    def moved_since(self, before: EngineGauges) -> bool:
        """The engine has done something between the two looks: tokens came out, or prompts took or
        gave back KV memory."""
        return (self.generated_tokens, self.kv_free) != (before.generated_tokens, before.kv_free)

    def restarted_since(self, before: EngineGauges) -> bool:
        """It is another process."""
        starts = (before.started_at, self.started_at)
        return None not in starts and starts[0] != starts[1]


def _count(page: bytes, name: bytes) -> int | None:
    total = _sum(page, name)
    return None if total is None else max(0, round(total))


def _cache_configs(page: bytes) -> Iterator[dict[bytes, int]]:
    """Labels that say the size of KV memory: one sample a rank."""
    at = page.find(_CACHE_CONFIG)
    while at >= 0:
        end = page.find(b"\n", at)
        line = page[at : end if end >= 0 else len(page)]
        yield {name: int(value) for name, value in _INTEGER_LABELS.findall(line)}
        at = page.find(_CACHE_CONFIG, at + len(line))


def _tokens_of(config: Mapping[bytes, int]) -> int:
    """vLLM says it; older versions say blocks and their size only, which is too much where layers
    keep a window only."""
    tokens = config.get(b"kv_cache_size_tokens")
    return _blocks_of(config) * config.get(b"block_size", 0) if tokens is None else tokens


def _blocks_of(config: Mapping[bytes, int]) -> int:
    return config.get(b"num_gpu_blocks", 0)


def _sum(page: bytes, name: bytes) -> float | None:
    values = list(_values(page, name))
    return sum(values) if values else None


def _values(page: bytes, name: bytes) -> Iterator[float]:
    """Of every sample with this name: `name{labels} value [timestamp]`."""
    at = page.find(name)
    while at >= 0:
        end = page.find(b"\n", at)
        line = page[at : end if end >= 0 else len(page)]
        begins_line = at == 0 or page[at - 1 : at] == b"\n"
        if begins_line and line[len(name) : len(name) + 1] in (b"{", b" ", b"\t"):
            # Values of labels may hold spaces and braces; the last brace is that of the labels.
            words = line[max(line.rfind(b"}") + 1, len(name)) :].split(None, 1)
            value = _number(words[0]) if words else None
            if value is not None:
                yield value
        at = page.find(name, at + len(line))


def _number(word: bytes) -> float | None:
    try:
        value = float(word)
    except ValueError:
        return None
    return value if math.isfinite(value) else None

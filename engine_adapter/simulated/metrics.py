"""/metrics of a simulated engine (engine_adapter.simulated), under vLLM's names."""

from __future__ import annotations

from engine_adapter.simulated.replica import Replica

CONTENT_TYPE = "text/plain; version=1.0.0; charset=utf-8"


def metrics_text(replica: Replica, model: str, started_at: float) -> bytes:
    """The exposition, in Prometheus' text format; what vLLM does not have is called `simulated:`.

    `started_at`: of time.time().
    """
    scheduler = replica.scheduler
    counters = scheduler.counters
    labels = f'{{engine="0",model_name="{model}"}}'
    gauges = {
        "num_requests_running": scheduler.num_running,
        "num_requests_waiting": scheduler.num_waiting,
        "kv_cache_usage_perc": scheduler.kv_usage,
    }
    totals = {
        "prefix_cache_queries": counters.queried_tokens,
        "prefix_cache_hits": counters.hit_tokens,
        "external_prefix_cache_queries": 0,
        "external_prefix_cache_hits": 0,
        "prompt_tokens": counters.prompt_tokens,
        "prompt_tokens_cached": counters.hit_tokens,
        "generation_tokens": counters.generated_tokens,
        "num_preemptions": counters.preemptions,
    }
    lines = [
        "# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.",
        "# TYPE process_start_time_seconds gauge",
        f"process_start_time_seconds {started_at!r}",
    ]
    size = f'kv_cache_size_tokens="{scheduler.kv_tokens}",num_gpu_blocks="{scheduler.kv_blocks}"'
    info = f'vllm:cache_config_info{{{size},engine="0"}} 1.0'
    lines += ["# TYPE vllm:cache_config_info gauge", info]
    for name, value in gauges.items():
        lines += [f"# TYPE vllm:{name} gauge", f"vllm:{name}{labels} {float(value)!r}"]
    for name, value in totals.items():
        lines += [
            f"# TYPE vllm:{name}_total counter",
            f"vllm:{name}_total{labels} {float(value)!r}",
        ]
    lines += [
        "# TYPE vllm:request_success_total counter",
        f'vllm:request_success_total{{engine="0",finished_reason="length",model_name="{model}"}} '
        f"{float(counters.finished)!r}",
        f'vllm:request_success_total{{engine="0",finished_reason="abort",model_name="{model}"}} '
        f"{float(counters.aborted)!r}",
        "# TYPE simulated:busy_seconds_total counter",
        f"simulated:busy_seconds_total{labels} {counters.busy_s!r}",
        "# TYPE simulated:latest_step_seconds gauge",
        f"simulated:latest_step_seconds{labels} {replica.latest_s!r}",
        "# TYPE simulated:lost_seconds_total counter",
        f"simulated:lost_seconds_total{labels} {replica.lost_s!r}",
        "",
    ]
    return "\n".join(lines).encode()

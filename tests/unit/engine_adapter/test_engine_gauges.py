"""The numbers that are picked out of an engine's /metrics."""

from __future__ import annotations

import pytest

from engine_adapter.engine_gauges import EngineGauges
from policies.routing.engine_load import EngineLoad

PAGE = b"""# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.
# TYPE process_start_time_seconds gauge
process_start_time_seconds 1.78496432e+09
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a b} 7"} 3.0
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:cache_config_info{block_size="16",kv_cache_size_tokens="4096",num_gpu_blocks="300"} 1.0
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="m"} 1234.0
vllm:generation_tokens_created{engine="0",model_name="m"} 1.78496432e+09
"""


def test_a_page_of_vllm_is_read():
    """Comments, longer names and braces within labels are not mistaken for samples."""
    assert EngineGauges.parse(PAGE) == EngineGauges(
        running=3,
        waiting=2,
        kv_free=0.75,
        kv_tokens=4096,
        kv_blocks=300,
        generated_tokens=1234.0,
        started_at=1784964320.0,
    )


@pytest.mark.parametrize(
    ("labels", "tokens"),
    [
        (b'block_size="16",num_gpu_blocks="300"', 4800),
        (b'num_gpu_blocks="300",engine="0",block_size="16"', 4800),
        (b'num_gpu_blocks_override="300",block_size="16"', None),
        (b'block_size="16",kv_cache_size_tokens="None",num_gpu_blocks="10"', 160),
        (b'model="kv_cache_size_tokens",block_size="16"', None),
        (b"", None),
    ],
)
def test_the_size_of_kv_memory_stands_in_labels(labels, tokens):
    """In tokens where the engine says it, else in blocks of so many tokens."""
    page = b"vllm:cache_config_info{%s} 1.0\n" % labels
    assert EngineGauges.parse(page).kv_tokens == tokens


def test_the_memory_of_all_ranks_counts():
    """Each has a sample of its own."""
    line = b'vllm:cache_config_info{engine="%d",kv_cache_size_tokens="100",num_gpu_blocks="7"} 1.0'
    gauges = EngineGauges.parse(b"\n".join(line % rank for rank in range(3)))
    assert (gauges.kv_tokens, gauges.kv_blocks) == (300, 21)


def test_load_is_what_the_estimate_needs():
    """Free memory and its size may be unknown; how many requests there are may not."""
    assert EngineGauges(3, 2, 0.25, 1.0, 2.0, 4096, 300).load == EngineLoad(3, 2, 0.25, 4096)
    assert EngineGauges(running=1, waiting=0).load == EngineLoad(1, 0)
    assert EngineGauges(running=1).load is None
    assert EngineGauges(waiting=1, kv_free=1.0).load is None


def test_ranks_behind_one_server_are_summed():
    """Their shares of KV memory are averaged."""
    page = (
        b'vllm:num_requests_running{engine="0"} 3.0\nvllm:num_requests_running{engine="1"} 4.0\n'
        b'vllm:kv_cache_usage_perc{engine="0"} 0.5\nvllm:kv_cache_usage_perc{engine="1"} 1.0'
    )
    gauges = EngineGauges.parse(page)
    assert (gauges.running, gauges.waiting, gauges.kv_free) == (7, None, 0.25)


@pytest.mark.parametrize(
    "page",
    [
        b"",
        b"\n\n",
        b"<html>not found</html>",
        b"vllm:num_requests_running",
        b"vllm:num_requests_running ",
        b"vllm:num_requests_running{",
        b'vllm:num_requests_running{a="b"} NaN\n',
        b"vllm:num_requests_running +Inf\n",
        b"vllm:num_requests_running three\n",
        b" vllm:num_requests_running 3\n",
        b"xvllm:num_requests_running 3\n",
        b"\xff\x00" * 100,
    ],
)
def test_what_is_absent_or_unreadable_is_none(page):
    """No page breaks a look."""
    assert EngineGauges.parse(page) == EngineGauges()


def test_samples_may_have_no_labels_and_a_time():
    """As the format allows."""
    gauges = EngineGauges.parse(b"vllm:num_requests_running\t3 1784964320000\r\n")
    assert gauges.running == 3


def test_shares_and_counts_stay_in_their_range():
    """An engine may report a little more than all of its memory."""
    page = b"vllm:kv_cache_usage_perc 1.0000001\nvllm:num_requests_running -1\n"
    gauges = EngineGauges.parse(page)
    assert (gauges.kv_free, gauges.running) == (0.0, 0)


def test_movement_is_tokens_or_kv_memory():
    """Not the number of requests, which we change ourselves."""
    still = EngineGauges(running=1, waiting=0, kv_free=0.5, generated_tokens=7.0)
    assert not EngineGauges(5, 2, 0.5, 7.0).moved_since(still)
    assert EngineGauges(1, 0, 0.5, 8.0).moved_since(still)
    assert EngineGauges(1, 0, 0.4, 7.0).moved_since(still)
    assert not EngineGauges().moved_since(EngineGauges())


def test_a_restart_is_another_start_time():
    """Unknown ones prove nothing."""
    assert EngineGauges(started_at=2.0).restarted_since(EngineGauges(started_at=1.0))
    assert not EngineGauges(started_at=1.0).restarted_since(EngineGauges(started_at=1.0))
    assert not EngineGauges().restarted_since(EngineGauges(started_at=1.0))
    assert not EngineGauges(started_at=1.0).restarted_since(EngineGauges())

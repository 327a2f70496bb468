"""The gateway's subscriber against the publisher that vLLM itself has."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from waiting import until

from engine_adapter.event_subscriber import EventSubscriber
from prefix_store.event_source import EventSource
from prefix_store.residency import Residency

BLOCK = 32


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, at import
async def test_vllms_own_publisher_is_followed_through_a_long_replay(tmp_path: Path) -> None:
    """Its whole buffer of 10,000 batches, which its sockets may drop in part, and live batches
    in the middle of it: nothing is lost and nothing doubled."""
    from vllm.distributed import kv_events

    def stored(block: int) -> Any:
        event = kv_events.BlockStored(
            [block], None, [block] * BLOCK, BLOCK, lora_id=None, medium="GPU", lora_name=None
        )
        return kv_events.KVEventBatch(time.time(), [event])

    events, replay = f"ipc://{tmp_path}/e", f"ipc://{tmp_path}/r"
    publisher = kv_events.ZmqEventPublisher(0, events, replay, topic="kv-events")
    residency = Residency(64 * 1024**2)
    source = EventSource("engine-0", residency, model="m", block_size=BLOCK)
    subscriber = EventSubscriber("engine-0", events, replay, source)
    try:
        for block in range(9_500):
            publisher.publish(stored(block))
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(subscriber.run())
            await until(lambda: source.stats().blocks > 0)
            for block in range(9_500, 9_900):
                publisher.publish(stored(block))
            await until(lambda: source.stats().blocks == 9_900 and not subscriber.state().lacking)
            state = subscriber.state()
            assert (state.last_sequence, state.batches, state.incarnation) == (9_899, 9_900, 1)
            running.cancel()
    finally:
        await asyncio.to_thread(publisher.shutdown)

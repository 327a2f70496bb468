"""Waiting for what goes on beside a test."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any


def spin_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    """Without a long pause: what is waited for may last milliseconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.0005)


async def until(condition: Callable[[], Any], seconds: float = 60) -> None:
    """Look every few milliseconds; the condition may be a coroutine function."""
    async with asyncio.timeout(seconds):
        while True:
            holds = condition()
            if asyncio.iscoroutine(holds):
                holds = await holds
            if holds:
                return
            await asyncio.sleep(0.005)


def in_background(call: Callable[[], Any]) -> Callable[[], Any]:
    """Start `call`; the result is a function that waits for its answer."""
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(call()))
    thread.start()

    def wait() -> Any:
        thread.join(240)
        assert answers, "the request failed"
        return answers[0]

    return wait

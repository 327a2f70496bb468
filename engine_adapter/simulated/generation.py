"""One request to a simulated engine (engine_adapter.simulated) while its answers are made."""

from __future__ import annotations

import asyncio

from engine_adapter.simulated.replica import Replica
from engine_adapter.simulated.sequence import Job, Sequence, nobody


class Generation:
    """All sequences of one request: a context manager that aborts what is not complete."""

    def __init__(self, replica: Replica, jobs: list[Job], *, streams: bool, chunk_s: float) -> None:
        """`chunk_s`: simulated time between two pieces of a stream."""
        self._replica = replica
        self._jobs = jobs
        self._streams = streams
        self._chunk_s = chunk_s
        self._wake = asyncio.Event()
        self._shown_at = 0.0
        self._unfinished = 0
        self.sequences: list[Sequence] = []

    def __enter__(self) -> Generation:
        self._unfinished = len(self._jobs)
        for job in self._jobs:
            self.sequences.append(self._replica.submit(job, self._progressed))
        return self

    def __exit__(self, *_: object) -> None:
        for sequence in self.sequences:
            self._replica.abort(sequence)
            sequence.progressed = nobody  # no cycle is left for the garbage collector

    async def wait(self) -> bool:
        """Until there is something new to show; True: it is the last."""
        await self._wake.wait()
        self._wake.clear()
        return not self._unfinished

    def _progressed(self, sequence: Sequence, now: float) -> None:
        if sequence.is_finished:
            self._unfinished -= 1
            if not self._unfinished:
                self._wake.set()
                return
        if self._streams and (
            sequence.first_token_at == now or now - self._shown_at >= self._chunk_s
        ):
            self._shown_at = now
            self._wake.set()

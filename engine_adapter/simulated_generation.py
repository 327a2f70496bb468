"""One request to a simulated engine (engine_adapter.simulated) while its answers are made."""

from __future__ import annotations

import asyncio

from engine_adapter.simulated_options import SimulationOptions
from engine_adapter.simulated_replica import Replica
from engine_adapter.simulated_request import EngineRequest, Served
from engine_adapter.simulated_sequence import Job, Sequence, nobody
from engine_adapter.simulated_words import Words, answer_to
from prefix_store.hashing import TokenIds


class Generation:
    """All sequences of one request: a context manager that aborts what is not complete."""

    def __init__(
        self,
        replica: Replica,
        request: EngineRequest,
        served: Served,
        words: Words,
        options: SimulationOptions,
    ) -> None:
        self._replica = replica
        self._streams = request.stream
        self._chunk_s = options.min_chunk_s * options.speed
        self._wake = asyncio.Event()
        self._shown_at = 0.0
        self._unfinished = 0
        self._jobs = [
            _job(request, prompt, copy, served, words, options)
            for prompt in request.prompts
            for copy in range(request.copies)
        ]
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


def _job(  # noqa: PLR0917 (one place puts it together)
    request: EngineRequest,
    prompt: TokenIds,
    copy: int,
    served: Served,
    words: Words,
    options: SimulationOptions,
) -> Job:
    answer = answer_to(prompt, 1, options.seed + copy, words.answer_ids)
    room = served.max_model_len - prompt.size
    count = request.max_tokens
    if count is None:  # the answer ends by itself: any length up to twice the mean
        count = min(room, 1 + int(answer[0]) % (2 * options.answer_tokens))
    return Job(
        prompt=prompt,
        answer=answer_to(prompt, min(count, room), options.seed + copy, words.answer_ids),
        salt=request.salt,
        adapter=request.adapter,
        adapter_number=served.adapter_number(request.adapter),
        priority=request.priority,
        streams=request.stream,
        reports_reused=request.reports_reused,
    )

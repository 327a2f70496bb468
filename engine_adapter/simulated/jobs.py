"""From a request to the jobs of a simulated engine (engine_adapter.simulated)."""

from __future__ import annotations

from dataclasses import dataclass

from engine_adapter.simulated.request import EngineRequest, Served
from engine_adapter.simulated.sequence import Job
from engine_adapter.simulated.words import Words, answer_to
from prefix_store.hashing import TokenIds


@dataclass(frozen=True, slots=True)
class JobMaker:
    """Decides what is answered."""

    served: Served
    words: Words
    seed: int
    answer_tokens: int
    """Mean length of answers that end by themselves."""

    def jobs(self, request: EngineRequest) -> list[Job]:
        """One for each prompt and each of its copies, in the order of the choices."""
        return [
            self._job(request, prompt, self.seed + copy)
            for prompt in request.prompts
            for copy in range(request.copies)
        ]

    def _job(self, request: EngineRequest, prompt: TokenIds, seed: int) -> Job:
        room = self.served.max_model_len - prompt.size
        count = request.max_tokens
        if count is None:  # any length up to twice the mean
            (first,) = answer_to(prompt, 1, seed, self.words.answer_ids).tolist()
            count = 1 + first % (2 * self.answer_tokens)
        return Job(
            prompt=prompt,
            answer=answer_to(prompt, min(count, room), seed, self.words.answer_ids),
            salt=request.salt,
            adapter=request.adapter,
            adapter_number=self.served.adapter_number(request.adapter),
            priority=request.priority,
            streams=request.stream,
            reports_reused=request.reports_reused,
        )

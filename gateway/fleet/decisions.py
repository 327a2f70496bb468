"""What was decided lately, and how often which way: for the statistics and the debug header."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

import msgspec

from policies.routing.base import Decision, Evidence, Score

RECENT = 32
_MAX_SHOWN = 16
"""Candidates of one decision that are written out: the best ones."""


class ScoreLine(msgspec.Struct, frozen=True):
    """A candidate in a decision, in words of the statistics."""

    replica: str
    score: float
    device_tokens: int
    stored_tokens: int
    queue_s: float
    load_s: float
    prefill_s: float
    running: int
    waiting: int
    kv_free: float | None
    evidence: str


class DecisionLine(msgspec.Struct, frozen=True):
    """One decision, in words of the statistics."""

    request_id: str
    replica: str
    """Where the request went: the best candidate that had room."""
    kind: str
    reason: str
    evidence: str
    num_tokens: int
    attempt: int
    """1 for the first replica that was asked."""
    waited_s: float
    """For a prefix that another request was computing, and for a place."""
    candidates: tuple[ScoreLine, ...]
    """Best first; at most 16."""

    def header(self) -> str:
        """As a value of a header: JSON, in ASCII."""
        return msgspec.json.encode(self).decode("ascii", "backslashreplace")


@dataclass(frozen=True, slots=True)
class Made:
    """A decision that was carried out."""

    decision: Decision
    replica: str
    request_id: str
    num_tokens: int
    attempt: int
    waited_s: float

    @property
    def evidence(self) -> Evidence:
        """What was known of the replica that was chosen."""
        for score in self.decision.ranking:
            if score.candidate.replica == self.replica:
                return score.candidate.evidence
        return Evidence.FALLBACK

    def line(self) -> DecisionLine:
        """Written out."""
        return DecisionLine(
            request_id=self.request_id,
            replica=self.replica,
            kind=self.decision.kind,
            reason=self.decision.reason,
            evidence=self.evidence.value,
            num_tokens=self.num_tokens,
            attempt=self.attempt,
            waited_s=round(self.waited_s, 6),
            candidates=tuple(_line(score) for score in self.decision.ranking[:_MAX_SHOWN]),
        )


def _line(score: Score) -> ScoreLine:
    candidate = score.candidate
    return ScoreLine(
        replica=candidate.replica,
        score=round(score.score, 6),
        device_tokens=candidate.device_tokens,
        stored_tokens=candidate.stored_tokens,
        queue_s=round(candidate.queue_s, 6),
        load_s=round(candidate.load_s, 6),
        prefill_s=round(candidate.prefill_s, 6),
        running=candidate.running,
        waiting=candidate.waiting,
        kv_free=candidate.kv_free,
        evidence=candidate.evidence.value,
    )


class Decisions:
    """Counts since the start, and the newest RECENT decisions."""

    def __init__(self) -> None:
        self.by_evidence: Counter[str] = Counter()
        self.by_reason: Counter[str] = Counter()
        self.retries: Counter[str] = Counter()
        """Further attempts, by what went wrong before."""
        self.joined = 0
        """Requests that waited for a prefix which another one was computing."""
        self._recent: deque[Made] = deque(maxlen=RECENT)

    def add(self, made: Made) -> None:
        """One more."""
        self.by_evidence[made.evidence.value] += 1
        self.by_reason[made.decision.reason] += 1
        self._recent.append(made)

    def recent(self) -> list[DecisionLine]:
        """The newest ones, newest first. Written out only when they are asked for."""
        return [made.line() for made in reversed(self._recent)]

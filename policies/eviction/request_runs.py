"""What the reuse-aware queue remembers of requests and of the blocks that they used."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from policies.access import Access, Stop
from policies.eviction.gap_model import EDGES_S, Curve, GapModel, bucket_of

MAX_USES = 2
"""Earlier uses of a block, as far as they are told apart."""

GAP_CLASSES_S = (0.5, 2.0, 8.0, 32.0, 128.0, 512.0, 2048.0)
"""Bounds of what is told apart of a block's last gap between two uses."""


@dataclass(frozen=True, slots=True)
class Past:
    """What a block's own history says."""

    uses: int = 0
    """Before the present one, MAX_USES at most."""
    gap_class: int = 0
    """Of the time between the last two uses; 0 where there was one."""

    def path(self) -> tuple[str, ...]:
        """Its category below that of the request."""
        if not self.uses:
            return ("new",)
        return (f"used {self.uses}", f"gap {self.gap_class}")


NEW = Past()


@dataclass(slots=True, eq=False)
class Watch:
    """A run that is being watched in one category, from a moment on."""

    run: Run
    curve: Curve
    start_s: float
    bucket: int = 0
    timed: bool = False
    """Whether a timer will move it into the next bucket."""

    @property
    def worth(self) -> float:
        """Of holding one of its tokens."""
        return self.curve.worth[self.bucket]

    @property
    def bucket_start_s(self) -> float:
        return self.start_s + EDGES_S[self.bucket]

    @property
    def due_s(self) -> float:
        """When it changes its bucket."""
        return self.start_s + EDGES_S[self.bucket + 1]

    @property
    def is_oldest(self) -> bool:
        return self.bucket + 1 == len(EDGES_S)

    def advance(self) -> None:
        """Into the next bucket."""
        tokens, at_s = self.run.tokens, self.due_s
        self.curve.leave(self.bucket, self.bucket_start_s, at_s, tokens)
        self.bucket += 1
        self.curve.enter(self.bucket, at_s, tokens)


@dataclass(slots=True, eq=False)
class Run:
    """Blocks of one prompt with the same past, that the same request was the last to use; here
    or gone, as long as it is known when they are asked for again."""

    request: Request
    past: Past
    tokens: int = 0
    watches: list[Watch] = field(default_factory=list)
    """Since its request came and, once that is known, since the answer ended: the last one says
    what it is worth."""
    candidates: set[Any] = field(default_factory=set)
    stacked: int = 0
    listed: bool = False
    ghost: Ghost | None = None
    """The last one of its blocks that left."""

    @property
    def is_live(self) -> bool:
        """Whether there is anything to watch."""
        return self.tokens > 0 or bool(self.candidates)

    def grow(self, tokens: int, now: float) -> None:
        """More blocks belong to it."""
        self.tokens += tokens
        for watch in self.watches:
            since_s = watch.bucket_start_s
            watch.curve.enter(watch.bucket, since_s, tokens)
            watch.curve.unwatch(watch.bucket, tokens * max(0.0, now - since_s))

    def shrink(self, tokens: int, now: float, *, reused: bool) -> None:
        """Blocks were used again, or are lost sight of."""
        tokens = min(tokens, self.tokens)
        self.tokens -= tokens
        for watch in self.watches:
            watch.curve.leave(watch.bucket, watch.bucket_start_s, now, tokens)
            if reused:
                watch.curve.reuse(watch.bucket, tokens)

    def next_past(self, now: float) -> Past:
        """Of its blocks when they are used at `now`."""
        gap_s = now - self.request.start_s
        gap_class = 1 + sum(gap_s >= bound for bound in GAP_CLASSES_S)
        return Past(min(self.past.uses + 1, MAX_USES), gap_class)


@dataclass(slots=True, eq=False)
class Request:
    """One request, by its access."""

    access: Access
    start_s: float
    runs: dict[Past, Run] = field(default_factory=dict)
    seen_tokens: int = 0
    """Of its prompt: found, taken in or refused."""
    cover: Cover | None = None
    ended: bool = False

    @property
    def prompt_tokens(self) -> int:
        """As it was told; otherwise as far as it was seen."""
        return self.access.num_tokens or self.seen_tokens

    @property
    def has_ended(self) -> bool:
        return self.access.stop is not Stop.UNKNOWN

    def category(self) -> tuple[str, ...]:
        """Of its runs, before their own past."""
        return ("ended", self.access.stop.value)


@dataclass(slots=True)
class Ghost:
    """Blocks of a run that are not in the tier: from this hash on towards the tail."""

    hash: bytes
    run: Run
    tokens: int
    depth: int


@dataclass(slots=True)
class Cover:
    """What is known of the next blocks of a prompt: they belonged to a ghost."""

    run: Run
    tokens: int


RUNNING = ("running",)


def watch_request(model: GapModel, run: Run, now: float) -> Watch:
    """Watch a run since its request came, as from now on."""
    start_s = run.request.start_s
    curve = model.curve(RUNNING + run.past.path())
    watch = Watch(run, curve, start_s, bucket_of(now - start_s))
    run.watches.append(watch)
    return watch


def watch_answer(model: GapModel, run: Run, ended_s: float, now: float) -> Watch:
    """Watch it also since its answer ended, as from then on."""
    curve = model.curve(run.request.category() + run.past.path())
    watch = Watch(run, curve, ended_s, bucket_of(now - ended_s))
    curve.skip(watch.bucket, run.tokens)
    curve.enter(watch.bucket, watch.bucket_start_s, run.tokens)
    run.watches.append(watch)
    return watch

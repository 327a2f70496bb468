"""Retention: rules that say how long blocks of which requests stay, on top of any eviction."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase

from pydantic import Field, model_validator

from policies.access import DEFAULT_PRIORITY, PLAIN, Access, Retention
from policies.base import Duration, Settings


class RetentionMatch(Settings):
    """Which requests a rule is about: those for which every key given here holds. In texts `*`
    stands for any characters, and nothing else is special."""

    tenant: str | None = None
    model: str | None = None
    session: str | None = None
    prefix: str | None = None
    """Name that the client gave its prefix (prompt_cache_key)."""
    min_tokens: int | None = Field(default=None, ge=1)
    """Of the prompt. A prompt of unknown length matches no rule about length."""
    max_tokens: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _range(self) -> RetentionMatch:
        if (self.min_tokens or 0) > (self.max_tokens or math.inf):
            raise ValueError("min_tokens is larger than max_tokens, so nothing would match")
        return self

    def holds(self, access: Access) -> bool:
        texts = (
            (self.tenant, access.tenant),
            (self.model, access.model),
            (self.session, access.session),
            (self.prefix, access.prefix),
        )
        if not all(pattern is None or _matches(pattern, text) for pattern, text in texts):
            return False
        tokens = access.num_tokens
        if self.min_tokens is not None and tokens < self.min_tokens:
            return False
        return self.max_tokens is None or 0 < tokens <= self.max_tokens


class RetentionRule(Settings):
    """What holds for the blocks of requests that match, from their last use on."""

    match: RetentionMatch = RetentionMatch()
    ttl: Duration | None = Field(default=None, gt=0.0, allow_inf_nan=False)
    """So long after their last use they become the first to go."""
    priority: int | None = Field(default=None, ge=0, le=100)
    """Lower ones go first; without a rule it is 50."""
    pin: bool | None = None
    """They do not go at all until `ttl` is over, within the tier's budget for pins."""

    @model_validator(mode="after")
    def _complete(self) -> RetentionRule:
        if self.pin and self.ttl is None:
            raise ValueError("pin needs a ttl: pins that never end would fill the tier for good")
        if self.ttl is None and self.priority is None and self.pin is None:
            raise ValueError("the rule says nothing: give ttl, priority or pin")
        return self


def decide(rules: Sequence[RetentionRule], access: Access) -> Retention:
    """What the rules say of a request's blocks. Key by key the first matching rule that sets it
    wins, so special rules stand before general ones; keys that no rule sets keep their default."""
    ttl_s: float | None = None
    priority: int | None = None
    pin: bool | None = None
    for rule in rules:
        if not rule.match.holds(access):
            continue
        ttl_s = rule.ttl if ttl_s is None else ttl_s
        priority = rule.priority if priority is None else priority
        pin = rule.pin if pin is None else pin
    if ttl_s is None and priority is None and pin is None:
        return PLAIN
    return Retention(ttl_s, DEFAULT_PRIORITY if priority is None else priority, bool(pin))


def _matches(pattern: str, text: str) -> bool:
    return fnmatchcase(text, pattern.replace("[", "[[]").replace("?", "[?]"))

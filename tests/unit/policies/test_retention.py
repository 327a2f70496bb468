"""Retention rules: who matches, which rule wins, what is refused."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from policies.access import PLAIN, Access, Retention
from policies.retention import RetentionMatch, RetentionRule, decide


def rule(**keys: object) -> RetentionRule:
    return RetentionRule.model_validate(keys)


@pytest.mark.parametrize(
    ("match", "access", "holds"),
    [
        ({}, Access(), True),
        ({"tenant": "a"}, Access(tenant="a"), True),
        ({"tenant": "a"}, Access(tenant="ab"), False),
        ({"tenant": "a*"}, Access(tenant="ab"), True),
        ({"model": "*/llama-?"}, Access(model="x/llama-?"), True),
        ({"model": "*/llama-?"}, Access(model="x/llama-3"), False),
        ({"session": "[ab]*"}, Access(session="[ab]1"), True),
        ({"session": "[ab]*"}, Access(session="a1"), False),
        ({"prefix": "*"}, Access(), True),
        ({"prefix": "sys*", "tenant": "a"}, Access(prefix="system", tenant="b"), False),
        ({"min_tokens": 10}, Access(num_tokens=10), True),
        ({"min_tokens": 10}, Access(num_tokens=9), False),
        ({"max_tokens": 10}, Access(num_tokens=10), True),
        ({"max_tokens": 10}, Access(num_tokens=11), False),
        ({"max_tokens": 10}, Access(), False),
    ],
)
def test_a_rule_matches_when_all_its_keys_do(
    match: dict[str, object], access: Access, holds: bool
) -> None:
    """Only `*` is special; prompts of unknown length match no rule about length."""
    assert RetentionMatch.model_validate(match).holds(access) is holds


def test_the_first_rule_that_sets_a_key_wins_key_by_key() -> None:
    """A special rule can leave a key to a general one, and switch off its pin."""
    rules = [
        rule(match={"tenant": "a"}, priority=90),
        rule(match={"tenant": "a"}, priority=10, ttl="1m", pin=False),
        rule(ttl="1h", pin=True),
    ]
    assert decide(rules, Access(tenant="a")) == Retention(60.0, 90, pin=False)
    assert decide(rules, Access(tenant="b")) == Retention(3600.0, 50, pin=True)


def test_where_nothing_matches_retention_is_plain() -> None:
    """The very object, so that the common case is recognised at once."""
    assert decide([rule(match={"tenant": "a"}, priority=0)], Access()) is PLAIN
    assert decide([], Access()) is PLAIN


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"pin": True}, "pin needs a ttl"),
        ({}, "says nothing"),
        ({"priority": 101}, "priority"),
        ({"ttl": 0}, "ttl"),
        ({"ttl": float("inf")}, "ttl"),
        ({"ttl": "soon"}, "not a duration"),
        ({"ttl": 1, "match": {"min_tokens": 5, "max_tokens": 4}}, "nothing would match"),
        ({"ttl": 1, "match": {"user": "x"}}, "user"),
    ],
)
def test_rules_without_sense_are_refused_with_the_reason(
    keys: dict[str, object], reason: str
) -> None:
    """A typing error is found at start."""
    with pytest.raises(ValidationError, match=reason):
        rule(**keys)

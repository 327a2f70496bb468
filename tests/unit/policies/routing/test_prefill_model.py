"""What a prompt costs to compute."""

from __future__ import annotations

import math

import pytest

from policies.prefill_cost import attended
from policies.routing.prefill_model import DEFAULT_TOKEN_S, PrefillModel

BASE_S, LINEAR_S, QUADRATIC_S = 5e-3, 3e-5, 2e-9


def seconds_of(num_tokens: int, context: int) -> float:
    return BASE_S + LINEAR_S * num_tokens + QUADRATIC_S * attended(context, num_tokens)


def learned(requests: list[tuple[int, int]], slower: float = 1.0) -> PrefillModel:
    model = PrefillModel()
    for num_tokens, context in requests:
        model.observe(num_tokens, context, slower * seconds_of(num_tokens, context))
    return model


MIXED = [(64, 4000), (500, 0), (2000, 1000), (9000, 0), (300, 50_000), (30_000, 0)] * 6


def test_a_default_rate_stands_for_what_is_unknown() -> None:
    """In proportion to the tokens."""
    model = PrefillModel()
    assert model.seconds(2000, 0) == pytest.approx(2000 * DEFAULT_TOKEN_S)
    assert model.observations == 0


@pytest.mark.parametrize(("num_tokens", "context"), [(1000, 0), (200, 30_000), (60_000, 0)])
def test_the_cost_is_learned(num_tokens: int, context: int) -> None:
    """Within and somewhat beyond what was observed."""
    expected = seconds_of(num_tokens, context)
    assert learned(MIXED).seconds(num_tokens, context) == pytest.approx(expected, rel=0.05)


def test_what_a_prompt_adds_leaves_the_base_out() -> None:
    """An engine at work pays it anyway."""
    model = learned(MIXED)
    base_s = model.seconds(1000, 0) - model.added_seconds(1000, 0)
    assert base_s == pytest.approx(BASE_S, rel=0.2)
    assert model.added_seconds(0, 1000) == 0.0


def test_only_short_prompts_do_not_make_long_ones_free() -> None:
    """Where all that was seen took as long as a step, tokens still cost something."""
    model = PrefillModel()
    for number in range(200):
        model.observe(10 + number % 5, 4000, 0.02)
    assert model.seconds(20_000, 0) > 10 * model.seconds(10, 4000)


def test_a_change_is_followed() -> None:
    """Such as another model under the same name."""
    model = learned(MIXED)
    for num_tokens, context in MIXED * 12:
        model.observe(num_tokens, context, 4 * seconds_of(num_tokens, context))
    assert model.seconds(2000, 0) == pytest.approx(4 * seconds_of(2000, 0), rel=0.2)


@pytest.mark.parametrize(
    ("num_tokens", "context", "seconds"),
    [(0, 0, 1.0), (10, -1, 1.0), (10, 0, 0.0), (10, 0, math.inf), (10, 0, math.nan)],
)
def test_impossible_observations_are_left_out(
    num_tokens: int, context: int, seconds: float
) -> None:
    """Nothing is learned from them."""
    model = PrefillModel()
    model.observe(num_tokens, context, seconds)
    assert model.observations == 0

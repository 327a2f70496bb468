"""How long simulated steps take."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_adapter.simulated.timing import StepTiming, StepWork

TIMING = StepTiming()


def test_chunks_attend_to_everything_before_them() -> None:
    """A prompt in two chunks has the pairs of the same prompt in one."""
    whole, cut = StepWork(), StepWork()
    whole.add_prefill(0, 100)
    cut.add_prefill(0, 60)
    cut.add_prefill(60, 40)
    assert whole == cut
    assert whole.pairs == 5050


def test_every_part_counts() -> None:
    """Base, tokens, pairs, sequences and positions."""
    work = StepWork()
    work.add_prefill(10, 1)
    work.add_decode(99)
    assert StepTiming(1, 10, 100, 1000, 10_000).first_step_s(work) == pytest.approx(
        1 + 10 + 11 * 100 + 1000 + 100 * 10_000
    )


works = st.builds(StepWork, decodes=st.integers(0, 300), positions=st.integers(0, 5_000_000))


@given(works, st.integers(1, 500))
def test_steps_in_a_row_take_as_long_as_one_by_one(work: StepWork, steps: int) -> None:
    """Each sequence grows by one position a step."""
    one_by_one = sum(
        TIMING.first_step_s(StepWork(0, 0, work.decodes, work.positions + i * work.decodes))
        for i in range(steps)
    )
    assert TIMING.steps_s(work, steps) == pytest.approx(one_by_one)


@given(works, st.floats(0, 20))
def test_steps_within_is_the_inverse(work: StepWork, seconds: float) -> None:
    """So many steps are enough, and one less is not."""
    steps = TIMING.steps_within(work, seconds)
    assert TIMING.steps_s(work, steps) >= seconds * (1 - 1e-9)
    assert steps == 1 or TIMING.steps_s(work, steps - 1) <= seconds * (1 + 1e-9)


def test_scaled_scales_everything() -> None:
    """A slow engine is slow at all it does."""
    work = StepWork()
    work.add_prefill(10, 5)
    work.add_decode(99)
    assert TIMING.scaled(3).first_step_s(work) == pytest.approx(3 * TIMING.first_step_s(work))

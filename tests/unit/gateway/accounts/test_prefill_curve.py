"""The measured prefill curve."""

import random

import pytest

from gateway.accounts.prefill_curve import FEW_OBSERVATIONS, FEW_SPREAD, PrefillCurve

BASE_S, LINEAR_S, PAIR_S = 0.01, 4e-4, 2e-8


def true_s(uncached: int, context: int = 0) -> float:
    return BASE_S + LINEAR_S * uncached + PAIR_S * uncached * (context + uncached / 2)


def taught(*lengths: int, times: int = 10) -> PrefillCurve:
    curve = PrefillCurve()
    for length in lengths:
        for _ in range(times):
            curve.observe(length, 0, true_s(length))
    return curve


def test_an_untaught_curve_predicts_nothing() -> None:
    """Never a guess."""
    assert PrefillCurve().predict(1000) is None
    assert PrefillCurve().knots() == ()


@pytest.mark.parametrize(
    ("tokens", "known"), [(499, False), (500, True), (2000, True), (2001, False)]
)
def test_only_lengths_within_a_factor_of_two_are_predicted(tokens: int, known: bool) -> None:
    """One observation at 1,000 tokens speaks for 500 to 2,000."""
    assert (taught(1000).predict(tokens) is not None) is known


def test_a_gap_between_two_lengths_stays_unknown() -> None:
    """Short and long prompts do not calibrate the middle."""
    assert taught(100, 10_000).predict(1000) is None


def test_a_length_that_was_seen_is_predicted_as_measured() -> None:
    """Exact observations give the exact value and no spread."""
    prediction = taught(500, 1000, 4000).predict(1000)
    assert prediction is not None
    assert prediction.prefill_s == pytest.approx(true_s(1000))
    assert prediction.error_s == pytest.approx(0.0, abs=1e-9)


def test_a_single_observation_has_a_wide_error_bar() -> None:
    """Under five observations the error is half of the value."""
    few = taught(1000, times=FEW_OBSERVATIONS - 1).predict(1000)
    enough = taught(1000, times=FEW_OBSERVATIONS).predict(1000)
    assert few is not None
    assert enough is not None
    assert few.error_s == pytest.approx(FEW_SPREAD * few.prefill_s)
    assert enough.error_s < few.error_s


def test_a_single_length_never_overstates_longer_or_shorter_prompts() -> None:
    """Where the slope is unknown the prediction errs to the low side, and the bar says so."""
    curve = taught(1000)
    for tokens in (550, 1800):
        prediction = curve.predict(tokens)
        assert prediction is not None
        assert prediction.prefill_s <= true_s(tokens)
        assert prediction.prefill_s + 2 * prediction.error_s >= true_s(tokens) * 0.55


def test_noisy_neighbours_do_not_bend_the_curve() -> None:
    """A fifth of the requests takes three times as long: the median stays within 10%."""
    rng = random.Random(7)
    curve = PrefillCurve()
    for _ in range(600):
        tokens = rng.randint(200, 4000)
        seconds = true_s(tokens) * rng.lognormvariate(0, 0.05) * (3 if rng.random() < 0.2 else 1)
        curve.observe(tokens, 0, seconds)
    for tokens in (300, 700, 1500, 3000, 3900):
        prediction = curve.predict(tokens)
        assert prediction is not None
        assert prediction.prefill_s == pytest.approx(true_s(tokens), rel=0.1)
        assert prediction.error_s < 0.3 * prediction.prefill_s


def test_predictions_never_fall_with_more_tokens() -> None:
    """Medians that contradict each other are pooled."""
    rng = random.Random(3)
    curve = PrefillCurve()
    for _ in range(200):
        curve.observe(rng.randint(1, 5000), 0, rng.uniform(0.1, 2.0))
    known = [p.prefill_s for tokens in range(1, 9000, 17) if (p := curve.predict(tokens))]
    assert len(known) > 400
    assert known == sorted(known)


def test_the_curve_follows_a_machine_that_changed() -> None:
    """Only the newest observations of a length count."""
    curve = taught(1000, times=50)
    for _ in range(32):
        curve.observe(1000, 0, 2 * true_s(1000))
    prediction = curve.predict(1000)
    assert prediction is not None
    assert prediction.prefill_s == pytest.approx(2 * true_s(1000), rel=0.01)


def test_attention_over_the_reused_context_is_learned() -> None:
    """Warm requests teach what a longer context costs, and do not lift the cold line."""
    curve = taught(250, 500, 1000)
    assert curve.predict(500, 8000) is None
    for context in range(2000, 12_000, 500):
        curve.observe(500, context, true_s(500, context))
    cold, warm = curve.predict(500), curve.predict(500, 8000)
    assert cold is not None
    assert warm is not None
    assert cold.prefill_s == pytest.approx(true_s(500), rel=0.02)
    assert warm.prefill_s == pytest.approx(true_s(500, 8000), rel=0.05)


def test_warm_requests_alone_calibrate_nothing() -> None:
    """A short suffix after a long context says nothing of a cold prompt."""
    curve = PrefillCurve()
    for _ in range(20):
        curve.observe(30, 1900, 0.05)
    assert curve.predict(1930) is None
    assert curve.predict(30) is None


def test_impossible_observations_are_ignored() -> None:
    """Nothing computed or no time taken teaches nothing."""
    curve = PrefillCurve()
    curve.observe(0, 1000, 0.1)
    curve.observe(1000, 0, 0.0)
    curve.observe(1000, -1, 0.1)
    assert curve.knots() == ()


def test_memory_is_bounded() -> None:
    """A hundred thousand observations of all lengths leave at most 49 knots of 32."""
    rng = random.Random(5)
    curve = PrefillCurve()
    for _ in range(100_000):
        curve.observe(int(2 ** rng.uniform(0, 27)), 0, 0.1)
    assert len(curve.knots()) <= 49
    assert max(knot.observations for knot in curve.knots()) == 32

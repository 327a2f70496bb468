"""The prefill curve: from three numbers, from measured points."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prefix_store.simulation.base import SimulationError
from prefix_store.simulation.prefill_formula import PrefillFormula, parse_prefill


def test_numbers_are_base_linear_quadratic() -> None:
    """What the help says."""
    formula = parse_prefill("0.01,2e-5,1e-9")
    assert formula == PrefillFormula(0.01, 2e-5, 1e-9)
    assert formula.seconds(1000, 100) == pytest.approx(0.01 + 2e-3 + 1e-9 * 100 * 1050)


def test_measured_points_are_fitted(tmp_path: Path) -> None:
    """Points that follow a curve give that curve."""
    true = PrefillFormula(0.02, 5e-5, 2e-9)
    points = [
        {"tokens": u, "context": c, "seconds": true.seconds(c, u)}
        for u in (100, 1000, 8000) for c in (0, 4000)
    ]  # fmt: skip
    file = tmp_path / "curve.json"
    file.write_text(json.dumps(points))
    fitted = parse_prefill(str(file))
    for point in points:
        seconds = fitted.seconds(point["context"], point["tokens"])
        assert seconds == pytest.approx(point["seconds"], rel=1e-3)


@pytest.mark.parametrize("text", ["1,2,x", "1,2,-3", "1,nan,3", "/no/such/file"])
def test_mistakes_are_one_sentence(text: str) -> None:
    """Whatever is wrong, it is a SimulationError that names it."""
    with pytest.raises(SimulationError, match="prefill curve"):
        parse_prefill(text)


def test_too_few_or_malformed_points_are_refused(tmp_path: Path) -> None:
    """A curve has three coefficients."""
    file = tmp_path / "curve.json"
    file.write_text('[{"tokens": 1, "seconds": 1}]')
    with pytest.raises(SimulationError, match="three"):
        parse_prefill(str(file))
    file.write_text("{}")
    with pytest.raises(SimulationError, match=r"curve\.json"):
        parse_prefill(str(file))

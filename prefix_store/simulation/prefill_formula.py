"""How long a prompt's prefill takes, for the time that reuse saves."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import msgspec

from policies.prefill_cost import PrefillCost, attended
from prefix_store.simulation.base import SimulationError


@dataclass(frozen=True, slots=True)
class PrefillFormula:
    """seconds(u tokens computed after c reused) = base + linear * u + quadratic * u * (c + u / 2).

    The default is computed, not measured: a model of 8 billion parameters (32 layers, 4096 wide) on
    one accelerator that does 400 TFLOP/s. Give your own for times that mean something to you.
    """

    base_s: float = 0.005
    linear_s: float = 4e-5
    """2 FLOP per parameter and token."""
    quadratic_s: float = 1.3e-9
    """4 * layers * width FLOP per token and position that it looks back on."""

    def seconds(self, context: int, num_tokens: int) -> float:
        """Of computing `num_tokens` after `context` others."""
        return (
            self.base_s
            + self.linear_s * num_tokens
            + self.quadratic_s * attended(context, num_tokens)
        )


class _Point(msgspec.Struct):
    tokens: int
    seconds: float
    context: int = 0


def parse_prefill(text: str) -> PrefillFormula:
    """From "base,linear,quadratic" in seconds, or from a JSON file with measured points: a list of
    {"tokens": computed, "context": reused, "seconds": measured}. Raises SimulationError."""
    parts = text.split(",")
    if len(parts) == 3:
        try:
            base_s, linear_s, quadratic_s = map(float, parts)
        except ValueError:
            raise SimulationError(f"prefill curve {text!r}: write three numbers") from None
        if not all(0 <= number < math.inf for number in (base_s, linear_s, quadratic_s)):
            raise SimulationError(f"prefill curve {text!r}: the numbers must not be negative")
        return PrefillFormula(base_s, linear_s, quadratic_s)
    path = Path(text)
    try:
        points = msgspec.json.decode(path.read_bytes(), type=list[_Point])
    except OSError as error:
        raise SimulationError(
            f"prefill curve {text}: cannot be read ({error.strerror}); "
            "give base,linear,quadratic or a JSON file"
        ) from error
    except msgspec.DecodeError as error:
        raise SimulationError(f"prefill curve {text}: {error}") from error
    return _fitted(points, text)


def _fitted(points: list[_Point], source: str) -> PrefillFormula:
    cost = PrefillCost()
    for point in points:
        cost.observe(point.tokens, attended(point.context, point.tokens), point.seconds)
    # Differences of the fitted function give its coefficients.
    near, far = cost.seconds(0, 1000), cost.seconds(1000, 1000)
    if near is None or far is None:
        raise SimulationError(f"prefill curve {source}: give three measured points or more")
    quadratic_s = (far - near) / 1e6
    linear_s = (near - quadratic_s * attended(0, 1000)) / 1000
    formula = PrefillFormula(0.0, max(0.0, linear_s), max(0.0, quadratic_s))
    rests = [point.seconds - formula.seconds(point.context, point.tokens) for point in points]
    return PrefillFormula(max(0.0, sum(rests) / len(rests)), formula.linear_s, formula.quadratic_s)

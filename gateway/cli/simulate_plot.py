"""The results of `headstart simulate` as a picture: hit rate over capacity, a line per policy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from gateway.cli.simulate_table import OPTIMUM, short
from gateway.settings.user_error import UserError
from prefix_store.simulation.report import ReplayReport

_MARKERS = "osD^vPX*"


def save_plot(path: Path, title: str, reports: Sequence[ReplayReport]) -> None:
    """PNG or SVG, by the name of the file. Raises UserError."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    names = list(dict.fromkeys(report.policy for report in reports))
    for number, name in enumerate(sorted(names, key=lambda each: each == OPTIMUM)):
        points = [(r.capacity_tokens, r.token_hit_rate) for r in reports if r.policy == name]
        best = name == OPTIMUM
        axes.plot(
            [capacity for capacity, _ in points],
            [100 * rate for _, rate in points],
            label=name,
            color="black" if best else f"C{number % 10}",
            linestyle="--" if best else "-",
            marker="" if best and len(points) > 1 else _MARKERS[number % len(_MARKERS)],
        )
    capacities = sorted({report.capacity_tokens for report in reports})
    axes.set_xscale("log")
    axes.set_xticks(capacities, [short(capacity) for capacity in capacities])
    axes.minorticks_off()
    axes.set_xlabel("capacity (tokens)")
    axes.set_ylabel("hit rate by token (%)")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        with mpl.rc_context({"svg.hashsalt": "headstart"}):
            figure.savefig(path, dpi=150)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from error

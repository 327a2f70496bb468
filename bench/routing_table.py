"""The table of bench.routing, and its aims: met or missed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from bench.routing_reference import Reference
from bench.routing_result import Harness, Run

OURS = "least_ttft"
PLAIN = "round_robin"
AGENT_TRACE = "agent_sessions_a"
AGENT_GAIN = 2.0
MOST_HITS_LOST = 0.03
BIG_CACHE = "one big cache"

COLUMNS = (
    "policy", "hits", "all", "mean", "p50", "p90", "p99", "tokens", "busy", "lost", "valid",
)  # fmt: skip
LEGEND = (
    "hits: prompt tokens reused in the second half (all: in both). mean, p50, p90, p99: time to "
    "first token in the second half, simulated seconds. tokens, busy: computed prompt tokens and "
    "busy time, the replica with the most over the mean of all. lost: without a complete answer."
)


def title(run: Run) -> str:
    return f"{run.trace} at {run.load:.0%} load"


def cells(run: Run) -> list[str]:
    ttft = run.late_ttft
    busy = run.busy_imbalance
    return [
        run.policy,
        f"{run.late_hit_rate:.1%}",
        f"{run.hit_rate:.1%}",
        *(f"{s:.2f}" for s in (ttft.mean_s, ttft.p50_s, ttft.p90_s, ttft.p99_s)),
        f"{run.computed_imbalance:.2f}",
        "-" if busy is None else f"{busy:.2f}",
        str(run.lost),
        "NO" if run.faults else "yes",
    ]


def reference_cells(reference: Reference) -> list[str]:
    """Of the cache alone: it has no queue."""
    hits = [f"{reference.late_hit_rate:.1%}", f"{reference.hit_rate:.1%}"]
    return [BIG_CACHE, *hits, *("-",) * (len(COLUMNS) - 3)]


def grouped(runs: Sequence[Run]) -> list[list[Run]]:
    """Those that are compared with one another stand together."""
    return [list(each) for _, each in groupby(runs, key=lambda run: (run.trace, run.load))]


def table_rows(group: Sequence[Run], reference: Reference) -> list[list[str]]:
    return [*map(cells, group), reference_cells(reference)]


def markdown(runs: Sequence[Run], references: Mapping[str, Reference]) -> str:
    """One table for the documentation."""
    head = ["trace", "load", *COLUMNS]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for group in grouped(runs):
        first = group[0]
        where = [first.trace, f"{first.load:.0%}"]
        rows = table_rows(group, references[first.trace])
        lines += ["| " + " | ".join([*where, *row]) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def machine_lines(runs: Sequence[Run]) -> list[str]:
    """How busy the machine was, and which runs say nothing."""
    if not runs:
        return []
    lines = _busy_lines([run.harness for run in runs if run.harness is not None])
    for run in runs:
        if run.faults:
            lines.append(f"NOT VALID: {title(run)}, {run.policy}: {'; '.join(run.faults)}")
        if run.lost:
            lines.append(f"LOST: {title(run)}, {run.policy}: {dict(run.losses)}")
    return lines


def _busy_lines(harness: Sequence[Harness]) -> list[str]:
    if not harness:
        return ["in virtual time, without a gateway: see bench/routing_model.py"]
    lags = [each.loop_lag_s for each in harness if each.loop_lag_s is not None]
    engines = [each.engines_late_p99_s for each in harness if each.engines_late_p99_s is not None]
    return [
        f"cores used, most of all runs: gateway {max(each.gateway_cpu for each in harness):.2f}, "
        f"engines {max(each.engines_cpu for each in harness):.2f}, "
        f"client {max(each.client_cpu for each in harness):.2f}",
        "late at most (real ms): "
        f"client {max(each.client_late_p99_s for each in harness) * 1e3:.1f} (p99), "
        f"gateway's event loop {max(lags, default=0.0) * 1e3:.1f}, "
        f"engines {max(engines, default=0.0) * 1e3:.1f} (p99)",
    ]


def verdicts(runs: Sequence[Run], references: Mapping[str, Reference]) -> list[str]:
    """The aims of least_ttft, where it ran."""
    result: list[str] = []
    for group in grouped(runs):
        by_policy = {run.policy: run for run in group}
        ours = by_policy.pop(OURS, None)
        if ours is None:
            continue
        result += _lowest(ours, list(by_policy.values()))
        if ours.trace == AGENT_TRACE and PLAIN in by_policy:
            gain = by_policy[PLAIN].late_ttft.mean_s / ours.late_ttft.mean_s
            result.append(
                f"{title(ours)}: mean TTFT {gain:.1f} times lower than {PLAIN} "
                f"(aim: {AGENT_GAIN:g}): {_met(gain >= AGENT_GAIN)}"
            )
        lost = references[ours.trace].late_hit_rate - ours.late_hit_rate
        result.append(
            f"{title(ours)}: hit rate {100 * lost:+.1f} points below one big cache "
            f"(aim: at most {100 * MOST_HITS_LOST:.0f}): {_met(lost <= MOST_HITS_LOST)}"
        )
    return result


def _lowest(ours: Run, others: Sequence[Run]) -> list[str]:
    if not others:
        return []
    lines = []
    for name, figure in (("mean", "mean_s"), ("p99", "p99_s")):
        best = min(others, key=lambda run: getattr(run.late_ttft, figure))
        mine, its = getattr(ours.late_ttft, figure), getattr(best.late_ttft, figure)
        lines.append(
            f"{title(ours)}: {name} TTFT {mine:.2f} s, best other {best.policy} {its:.2f} s "
            f"(aim: the lowest): {_met(mine <= its)}"
        )
    return lines


def _met(is_met: bool) -> str:
    return "met" if is_met else "MISSED"

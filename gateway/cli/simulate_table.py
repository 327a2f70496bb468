"""The results of `headstart simulate` as tables and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from prefix_store.simulation.replay import ReplaySettings
from prefix_store.simulation.report import ReplayReport
from prefix_store.simulation.trace import Trace

OPTIMUM = "optimum"


def render(trace: Trace, settings: ReplaySettings, reports: Sequence[ReplayReport]) -> Table:
    """One row for each policy and capacity."""
    counted = f"{1 - settings.warm_up:.0%} of its requests counted"
    table = _table(f"{trace.name}, {counted}")
    layered = any(len(report.tiers) > 1 for report in reports)
    last_heading = "moved\nbetween tiers" if layered else "blocks\nevicted"
    headings = ("hit rate\nby token", "by\nrequest", "gap to\noptimum", "prefill\nsaved", "")
    table.add_column("tokens", justify="right", no_wrap=True)
    table.add_column("policy", min_width=8, overflow="fold")
    for heading in (*headings, last_heading):
        table.add_column(heading, justify="right", no_wrap=True)
    last = None
    for report in reports:
        if last not in (None, report.capacity_tokens):
            table.add_section()
        last = report.capacity_tokens
        gap = gap_to_optimum(report, reports)
        table.add_row(
            short(report.capacity_tokens),
            report.policy,
            f"{report.token_hit_rate:.1%}",
            f"{report.request_hit_rate:.1%}",
            "" if gap is None or report.policy == OPTIMUM else f"{gap:.1%}",
            _share(report.saved_s, report.prefill_s),
            f"{report.saved_s:,.0f} s",
            size(report.moved_bytes) if layered else f"{report.evicted_blocks:,}",
        )
    return table


def tiers_table(reports: Sequence[ReplayReport]) -> Table:
    """One row for each tier of each replay."""
    table = _table("tiers")
    table.add_column("policy, tier", no_wrap=True)
    for heading in ("capacity", "used", "hit rate", "written", "read up", "evicted", "refused"):
        table.add_column(heading, justify="right", no_wrap=True)
    for report in reports:
        table.add_row(report.policy)
        for i, tier in enumerate(report.tiers):
            table.add_row(
                f"  {tier.name}",
                size(tier.capacity_bytes),
                size(tier.used_bytes),
                _share(tier.hit_tokens, report.input_tokens),
                size(tier.written_bytes),
                size(tier.read_bytes) if i else "",
                short(tier.evicted_blocks),
                short(tier.refused_blocks),
            )
        table.add_section()
    return table


def gap_to_optimum(report: ReplayReport, reports: Sequence[ReplayReport]) -> float | None:
    """How much of the token hit rate is missing; None where no optimum was replayed."""
    for each in reports:
        if each.policy == OPTIMUM and each.capacity_tokens == report.capacity_tokens:
            return each.token_hit_rate - report.token_hit_rate
    return None


def to_json(trace: Trace, settings: ReplaySettings, reports: Sequence[ReplayReport]) -> str:
    """Everything, with the units in the names."""
    document = {
        "trace": trace.name,
        "requests": len(trace.requests),
        "blocks": trace.num_blocks,
        "distinct_blocks": trace.num_distinct,
        "settings": asdict(settings),
        "results": [_result(report, reports) for report in reports],
    }
    return json.dumps(document, indent=2) + "\n"


def _result(report: ReplayReport, reports: Sequence[ReplayReport]) -> dict[str, Any]:
    return {
        **asdict(report),
        "token_hit_rate": report.token_hit_rate,
        "request_hit_rate": report.request_hit_rate,
        "moved_bytes": report.moved_bytes,
        "evicted_blocks": report.evicted_blocks,
        "gap_to_optimum": gap_to_optimum(report, reports),
    }


def short(num_tokens: int) -> str:
    """300k, 1M, 1.5G."""
    for factor, suffix in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if num_tokens >= factor:
            return f"{num_tokens / factor:.4g}{suffix}"
    return str(num_tokens)


def size(num_bytes: int) -> str:
    """1.5 GiB."""
    amount = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.3g} {unit}"
        amount /= 1024
    return f"{amount:,.1f} TiB"


def _table(title: str) -> Table:
    return Table(
        title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0)
    )


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "-"

"""The statistics as a page for people: `headstart stats`. Readable at 80 columns."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from gateway.accounts.gauges import PolicyGauges, StoreGauges, TierGauges
from gateway.accounts.stats_schema import (
    CacheStats,
    Durations,
    PrefillSaved,
    PromptTokenCounts,
    WindowStats,
)
from gateway.accounts.windows import Window
from gateway.cli.fleet_table import fleet_tables
from gateway.cli.table_parts import (
    UNKNOWN,
    bar,
    plain_table,
    requests_of,
    seconds,
    section,
    window_of,
)
from gateway.settings.units import size, span

_LOWER_TIERS = ("reused, disk", "reused, Redis")
_WORDS = {
    Window.SINCE_START: "since start",
    Window.LAST_1M: "last minute",
    Window.LAST_10M: "last 10 minutes",
    Window.LAST_1H: "last hour",
}


def render(stats: CacheStats, window: str) -> RenderableType:
    """A page for one window: since_start, last_1m, last_10m or last_1h. ValueError for another."""
    chosen = Window(window)
    total = window_of(stats.total.windows, chosen)
    parts: list[RenderableType] = [_head(stats, chosen, total), _requests(stats, total)]
    if total.prompt_tokens.total:
        parts += [_waterfall(total.prompt_tokens), _saved(total.prefill_saved)]
    if total.first_token.total.count:
        parts.append(_first_token(total))
    if total.rendering_mismatches or total.unrendered_prompts or total.renderings_unconfirmed:
        parts.append(_rendering(total))
    parts += [_store(stats.store), *fleet_tables(stats, chosen)]
    spaced: list[RenderableType] = [parts[0]]
    for part in parts[1:]:
        spaced += [Text(), part]
    return Group(*spaced)


def _head(stats: CacheStats, window: Window, total: WindowStats) -> RenderableType:
    text = Text(f"Headstart {stats.version}", style="bold")
    text.append(
        f"  {stats.model}  up {span(stats.uptime_s)}  ({_WORDS[window]}: {span(total.covered_s)})",
        style="not bold",
    )
    return text


def _requests(stats: CacheStats, total: WindowStats) -> RenderableType:
    ended, rates = total.requests, total.hit_rates
    lines = [
        f"{ended.total:,} ended: {ended.ok:,} ok, {ended.cancelled:,} cancelled, "
        f"{ended.refused:,} refused, {ended.engine_error:,} engine errors",
        f"now {stats.in_flight:,} in flight, {stats.waiting:,} waiting",
    ]
    if rates.by_request is not None:
        share = f"{rates.by_request:.1%}"
        lines.append(f"{rates.hits:,} of {rates.requests:,} reused something ({share})")
    if total.too_short_requests:
        lines.append(f"{total.too_short_requests:,} too short to reuse anything (under one block)")
    return section("Requests", Text("\n".join(lines)))


def _waterfall(tokens: PromptTokenCounts) -> RenderableType:
    steps = [
        ("reused, engine's cache", tokens.delivered.device, "green"),
        ("reused, memory", tokens.delivered.memory, "green"),
        (_LOWER_TIERS[0], tokens.delivered.disk, "green"),
        (_LOWER_TIERS[1], tokens.delivered.redis, "green"),
        ("not delivered", tokens.not_delivered, "yellow"),
        ("elsewhere", tokens.elsewhere, "yellow"),
        ("evicted", tokens.evicted, "yellow"),
        ("never seen", tokens.never_seen, "blue"),
    ]
    # Tiers that brought nothing are left out: most stacks have none.
    steps = [step for step in steps if step[1] or step[0] not in _LOWER_TIERS]
    table = plain_table()
    table.add_column(min_width=22)
    table.add_column(justify="right")
    table.add_column(justify="right")
    table.add_column()
    for name, count, style in steps:
        share = count / tokens.total
        table.add_row(name, f"{count:,}", f"{share:.1%}", Text(bar(share), style=style))
    if tokens.unattributed:
        share = tokens.unattributed / tokens.total
        row = ("unattributed", f"{tokens.unattributed:,}", f"{share:.1%}")
        table.add_row(*row, "of the engine's cache, or of the store")
    table.add_row("total", f"{tokens.total:,}", "", f"{tokens.uncached:,} went through prefill")
    return section("Prompt tokens", table)


def _saved(saved: PrefillSaved) -> RenderableType:
    if saved.net_s is None or saved.error_s is None:
        text = "not known yet: no cold prompt of comparable length was measured"
    else:
        text = (
            f"{seconds(saved.net_s)} \N{PLUS-MINUS SIGN} {seconds(saved.error_s)}"
            f" over {requests_of(saved.measured_requests)}"
        )
        if saved.unmeasured_requests:
            text += f"; {saved.unmeasured_requests:,} more could not be measured"
        if saved.losing_requests:
            text += f"\n{requests_of(saved.losing_requests)} lost {seconds(saved.lost_s)} by it"
    return section("Prefill saved", Text(text))


def _first_token(total: WindowStats) -> RenderableType:
    times = total.first_token
    table = plain_table()
    for name in ("", "p50", "p90", "p99", "mean", "requests"):
        table.add_column(name, justify="right" if name else "left", min_width=8)
    parts: list[tuple[str, Durations]] = [
        ("gateway", times.gateway),
        ("queue and loading", times.queue),
        ("prefill", times.prefill),
        ("delivery", times.delivery),
        ("total", times.total),
    ]
    for name, part in parts:
        measured = (part.p50_s, part.p90_s, part.p99_s, part.mean_s)
        table.add_row(name, *(seconds(value) for value in measured), f"{part.count:,}")
    return section("Time to first token", table, header=True)


def _rendering(total: WindowStats) -> RenderableType:
    text = Text(
        f"{total.rendering_mismatches:,} prompts differ from the engine's count, "
        f"{total.unrendered_prompts:,} could not be rendered",
        style="yellow" if total.rendering_mismatches else "",
    )
    if total.renderings_unconfirmed:
        text.append(
            f"\n{total.renderings_unconfirmed:,} of {total.renderings_checked:,} samples may be "
            "other tokens: no engine announced them",
            style="yellow",
        )
    return section("Rendering", text)


def _store(store: StoreGauges | None) -> RenderableType:
    if store is None:
        return section("Store", Text("none, or it does not answer"))
    used = store.used_bytes / store.capacity_bytes if store.capacity_bytes else 0.0
    evicted = ", ".join(f"{count:,} {reason}" for reason, count in store.evicted_blocks.items())
    lines = [
        f"{size(store.used_bytes)} of {size(store.capacity_bytes)} used ({used:.1%}) {bar(used)}",
        f"{store.blocks:,} blocks, {store.leased_blocks:,} leased; "
        f"{size(store.reserved_bytes)} being written",
        f"{store.matched_blocks:,} of {store.asked_blocks:,} blocks looked up were there",
        f"{size(store.loaded_bytes)} loaded in {store.loads:,} loads, "
        f"{store.failed_loads:,} failed",
        f"{store.stored_blocks:,} blocks stored; evicted: {evicted or 'none'}",
        f"engines connected: {', '.join(store.engines) or 'none'}",
    ]
    for tier in store.tiers:
        lines += _tier(tier)
    lines += _policies(store.policies)
    return section("Store", Text("\n".join(lines)))


def _policies(policies: PolicyGauges | None) -> list[str]:
    """Only where the file and what is in force differ."""
    if policies is None:
        return []
    lines = []
    if policies.error is not None:
        lines.append(f"the changed configuration was refused: {policies.error}")
    if policies.needs_restart:
        lines.append(f"for the next start of the store: {', '.join(policies.needs_restart)}")
    return lines


def _tier(tier: TierGauges) -> list[str]:
    used = tier.used_bytes / tier.capacity_bytes if tier.capacity_bytes else 0.0
    evicted = ", ".join(f"{count:,} {reason}" for reason, count in tier.evicted_blocks.items())
    state = {"open": ", left alone after faults", "half_open": ", being tried again"}
    speed = UNKNOWN if tier.bandwidth_bytes_s is None else f"{size(tier.bandwidth_bytes_s)}/s"
    return [
        f"{tier.name}: {size(tier.used_bytes)} of {size(tier.capacity_bytes)} used "
        f"({used:.1%}), {tier.blocks:,} blocks{state.get(tier.breaker or '', '')}",
        f"  {size(tier.read_bytes)} read, {size(tier.written_bytes)} written; "
        f"latency {seconds(tier.latency_s)}, {speed}",
        f"  {tier.refused_blocks:,} not admitted, {tier.faults:,} faults; "
        f"evicted: {evicted or 'none'}",
    ]

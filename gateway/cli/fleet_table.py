"""The replicas and the routing as tables for people: part of `headstart stats`."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from gateway.accounts.gauges import EventGauges, ReplicaGauges, RoutingGauges
from gateway.accounts.stats_schema import CacheStats
from gateway.accounts.windows import Window
from gateway.cli.table_parts import UNKNOWN, percent, plain_table, seconds, section, window_of

_STYLES = {"ejected": "red", "draining": "yellow", "starting": "yellow"}


def fleet_tables(stats: CacheStats, window: Window) -> Iterator[RenderableType]:
    """Which replicas there are, how they are, and why requests went there."""
    yield _replicas(stats, window)
    if stats.routing is not None and stats.routing.by_reason:
        yield _routing(stats.routing)


def _replicas(stats: CacheStats, window: Window) -> RenderableType:
    table = plain_table()
    names = ("", "state", "requests", "in flight", "hits", "reused", "TTFT p50", "events")
    for name in names:
        table.add_column(name, justify="left" if name in ("", "state", "events") else "right")
    notes: list[str] = []
    for replica, each in stats.replicas.items():
        numbers, state = window_of(each.windows, window), each.state
        condition = state.condition or UNKNOWN
        table.add_row(
            replica,
            Text(condition, style=_STYLES.get(condition, "")),
            f"{numbers.requests.total:,}",
            UNKNOWN if state.in_flight is None else f"{state.in_flight:,}",
            percent(numbers.hit_rates.by_request),
            percent(numbers.hit_rates.by_token),
            seconds(numbers.first_token.total.p50_s),
            _events(state),
        )
        if condition in _STYLES and state.reason:
            notes.append(f"{replica} is {condition}: {state.reason}")
    return Group(section("Replicas", table, header=True), *map(Text, notes))


def _events(state: ReplicaGauges) -> Text:
    events = state.events
    if events is None:
        return Text("off, guessed" if state.evidence == "approximate" else "off")
    if not events.connected:
        return Text("silent", style="red")
    if events.refused_blocks:
        return Text(f"blocks of {events.refused_block_size_tokens}", style="red")
    return _gaps(events)


def _gaps(events: EventGauges) -> Text:
    if events.gaps:
        return Text(f"on, {events.gaps:,} gaps", style="yellow")
    return Text("on")


def _routing(routing: RoutingGauges) -> RenderableType:
    total = max(1, sum(routing.by_reason.values()))
    table = plain_table()
    table.add_column()
    table.add_column(justify="right")
    table.add_column(justify="right")
    for reason, count in sorted(routing.by_reason.items(), key=lambda each: -each[1]):
        table.add_row(reason, f"{count:,}", percent(count / total))
    evidence = ", ".join(f"{count:,} {name}" for name, count in routing.by_evidence.items())
    notes = [f"by {routing.kind}; knowledge: {evidence}"]
    if routing.joined:
        notes.append(f"{routing.joined:,} waited for a prefix that another request was computing")
    if routing.retries:
        retries = ", ".join(f"{count:,} {name}" for name, count in routing.retries.items())
        notes.append(f"asked again elsewhere: {retries}")
    return Group(section("Routing", table), *map(Text, notes))

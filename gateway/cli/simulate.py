"""`headstart simulate`: replays a request trace against the policies, to choose on evidence."""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Sequence
from pathlib import Path

import yaml
from pydantic import ByteSize, TypeAdapter, ValidationError
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from gateway.cli.common import say
from gateway.cli.simulate_table import render, tiers_table, to_json
from gateway.settings.config_file import load_config
from gateway.settings.user_error import UserError
from policies.config import LowerTierConfig, MemoryTierConfig, StoreConfig, pin_budget_of
from policies.eviction import Eviction
from policies.eviction.retained import Retained
from policies.retention import decide
from prefix_store.simulation.grid import (
    Cell,
    Foresight,
    SimulatedEviction,
    TierPlan,
    optimum_of,
    replay_grid,
)
from prefix_store.simulation.prefill_formula import PrefillFormula, parse_prefill
from prefix_store.simulation.replay import ReplaySettings
from prefix_store.simulation.report import ReplayReport
from prefix_store.simulation.trace import Trace, read_trace

_POLICY: TypeAdapter[Eviction] = TypeAdapter(Eviction)
_SIZE: TypeAdapter[ByteSize] = TypeAdapter(ByteSize)
_SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9}


def run(args: argparse.Namespace) -> int:
    """Replay and print; files first, so that a closed pipe loses nothing."""
    store = _store_of(args)
    settings = _settings(args, store)
    cells = _cells(args, settings.token_bytes, store)
    _check_targets(args.json, args.plot)
    console = Console(stderr=True)
    with console.status(f"reading {args.trace}"):
        trace = read_trace(Path(args.trace))
    reports = _replay(cells, trace, settings, args.jobs, console)
    if args.json:
        _write(Path(args.json), to_json(trace, settings, reports))
    if args.plot:
        from gateway.cli.simulate_plot import save_plot  # noqa: PLC0415  (matplotlib is heavy)

        save_plot(Path(args.plot), trace.name, reports)
    out = Console()
    out.print(render(trace, settings, reports))
    if any(len(report.tiers) > 1 for report in reports):
        out.print(tiers_table(reports))
    say(_footer(trace, reports))
    return 0


def parse_policy(text: str) -> Eviction | Foresight:
    """From a kind such as `lru`, or a mapping as in the YAML file: `{kind: gdsf, ...}`; `belady`
    knows the future. Raises UserError."""
    if text == Foresight.BELADY.value:
        return Foresight.BELADY
    try:
        value = yaml.safe_load(text) if text.lstrip().startswith("{") else {"kind": text}
    except yaml.YAMLError as error:
        raise UserError(f"--policy {text}: not valid YAML; write {{kind: lru}}") from error
    try:
        return _POLICY.validate_python(value)
    except ValidationError as error:
        mistake = error.errors(include_url=False)[0]
        if mistake["type"] == "union_tag_invalid":
            kinds = mistake["ctx"]["expected_tags"].replace("'", "")
            raise UserError(
                f"--policy {text}: unknown policy; use one of: {kinds}, belady"
            ) from None
        where = ".".join(str(part) for part in mistake["loc"])
        raise UserError(f"--policy {text}: {where}: {mistake['msg']}") from None


def parse_capacity(text: str, token_bytes: int) -> int:
    """Bytes of a capacity in tokens (`300k`, `1.5M`, `1G`) or in bytes (`16GiB`). Raises
    UserError."""
    text = text.strip()
    try:
        if text[-1:].lower() == "b":
            size = int(_SIZE.validate_python(text))
        else:
            factor = _SUFFIXES.get(text[-1:].lower(), 1)
            number = text[:-1] if text[-1:].lower() in _SUFFIXES else text
            size = round(float(number) * factor) * token_bytes
    except (ValueError, OverflowError):
        raise UserError(
            f"--capacity {text!r}: write tokens such as 300k or 1M, or bytes such as 16GiB"
        ) from None
    if size < token_bytes:
        raise UserError(f"--capacity {text}: must be at least one token")
    return size


def _store_of(args: argparse.Namespace) -> StoreConfig | None:
    if args.config is None:
        return None
    store = load_config(Path(args.config)).store
    if store is None:
        raise UserError(f"{args.config}: `store: null` leaves nothing to simulate")
    return store


def _settings(args: argparse.Namespace, store: StoreConfig | None) -> ReplaySettings:
    if not 0.0 <= args.warm_up < 1.0:
        raise UserError(f"--warm-up {args.warm_up}: must be at least 0 and less than 1")
    if args.jobs is not None and args.jobs < 1:
        raise UserError(f"--jobs {args.jobs}: must be at least 1")
    try:
        token_bytes = int(_SIZE.validate_python(args.token_bytes))
    except ValidationError:
        token_bytes = 0
    if token_bytes < 1:
        raise UserError(f"--token-bytes {args.token_bytes}: write a size such as 128KiB")
    curve = args.prefill_curve
    prefill = parse_prefill(curve) if curve is not None else PrefillFormula()
    load = store is None or store.loading.kind != "never"
    return ReplaySettings(args.warm_up, token_bytes, prefill, load)


def _cells(args: argparse.Namespace, token_bytes: int, store: StoreConfig | None) -> list[Cell]:
    policies: list[tuple[str, Eviction | Foresight]]
    policies = [(text, parse_policy(text)) for text in args.policy or ()]
    capacities = [
        parse_capacity(part, token_bytes)
        for text in args.capacity or ()
        for part in text.split(",")
    ]
    if store is not None:
        capacities = capacities or [int(store.memory.capacity)]
        policies = policies or [(store.memory.eviction.kind, store.memory.eviction)]
    if not capacities:
        raise UserError("give --capacity, such as --capacity 1M,3M (tokens), or --config FILE")
    policies = policies or [("lru", parse_policy("lru"))]
    cells: list[Cell] = []
    for capacity in sorted(set(capacities)):
        row = [_cell(name, policy, capacity, store) for name, policy in policies]
        cells += row
        if not args.no_optimum:
            cells.append(optimum_of(row[0]))
    return cells


def _cell(
    name: str, policy: Eviction | Foresight, capacity: int, store: StoreConfig | None
) -> Cell:
    if store is None:
        return Cell(name, (TierPlan("memory", capacity, policy),))
    memory = store.memory.model_copy(update={"capacity": ByteSize(capacity)})
    tiers = [_plan("memory", memory, policy, store)]
    for below, tier in (("disk", store.disk), ("redis", store.redis)):
        if tier is not None:
            tiers.append(_plan(below, tier, tier.eviction, store))
    retention = functools.partial(decide, store.retention) if store.retention else None
    return Cell(name, tuple(tiers), retention)


def _plan(
    name: str,
    tier: MemoryTierConfig | LowerTierConfig,
    policy: Eviction | Foresight,
    store: StoreConfig,
) -> TierPlan:
    eviction: SimulatedEviction = policy
    if store.retention and not isinstance(policy, Foresight):
        eviction = Retained(policy, pin_budget_of(tier))
    on_save = isinstance(tier, LowerTierConfig) and tier.write == "on_save"
    return TierPlan(name, int(tier.capacity), eviction, tier.admission, on_save)


def _replay(
    cells: Sequence[Cell],
    trace: Trace,
    settings: ReplaySettings,
    jobs: int | None,
    console: Console,
) -> list[ReplayReport]:
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        console=console,
        auto_refresh=False,  # without a thread of its own, so that processes can be forked
        transient=True,
        disable=not console.is_terminal,
    )
    done = [0] * len(cells)
    with bar:
        task = bar.add_task(f"{len(cells)} replays", total=len(cells) * len(trace.requests))

        def advance(number: int, requests_done: int) -> None:
            done[number] = requests_done
            bar.update(task, completed=sum(done), refresh=True)

        return replay_grid(
            cells, trace, settings, jobs=jobs or os.cpu_count() or 1, progress=advance
        )


def _check_targets(json_file: str | None, plot_file: str | None) -> None:
    """A mistake here must not cost a long replay."""
    for path in (json_file, plot_file):
        if path is not None and (Path(path).is_dir() or not Path(path).absolute().parent.is_dir()):
            raise UserError(f"{path}: cannot be written; name a file in a directory that exists")
    if plot_file is not None and Path(plot_file).suffix.lower() not in (".png", ".svg"):
        raise UserError(f"--plot {plot_file}: the name must end in .png or .svg")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from error


def _footer(trace: Trace, reports: Sequence[ReplayReport]) -> str:
    seconds = sum(report.replay_s for report in reports)
    speed = sum(report.replayed_blocks for report in reports) / max(seconds, 1e-9)
    return (
        f"{len(trace.requests):,} requests, {trace.num_blocks:,} blocks, "
        f"{trace.num_distinct:,} different; {speed:,.0f} blocks a second per process"
    )

"""Routing policies on request traces: eight simulated replicas behind a real gateway process.

Every policy gets the same requests at the same times (seeds are fixed: the traces and the token ids
derived from them), at loads that are shares of what the fleet could do if its caches were one. The
replicas are simulations (engine_adapter.simulated): real HTTP servers with vLLM's KV events, a real
block cache and real queues, whose computing takes as long as a formula says, at accelerated time.
All times in the table are simulated seconds.

    python -m bench.routing --json routing.json --markdown routing.md
    python -m bench.routing --model          # for who works on a policy: see bench/routing_model.py
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import uvloop
from rich.console import Console

from bench.report import machine, write_json
from bench.routing_client import OpenLoop, Outcome, Pace
from bench.routing_fleet import NUM_REPLICAS, Fleet, FleetPlan, running_fleet
from bench.routing_model import ModelFleet
from bench.routing_reference import CAPACITY_SHARE, Reference, blocks_of_fleet, one_big_cache
from bench.routing_result import Asked, Reading, Run, run_of
from bench.routing_table import LEGEND, machine_lines, markdown, title, verdicts
from bench.routing_trace import SLICES, WIRE_BLOCK_TOKENS, Workload, load_workload
from bench.trace_files import add_traces, check_traces
from engine_adapter.simulated.timing import StepTiming
from gateway.demo.demo import runtime_dir
from policies.routing import LeastTtftRouting

POLICIES = ("round_robin", "least_loaded", "session_affinity", "prefix_affinity", "least_ttft")
LOADS = (0.4, 0.65, 0.85)
PATIENCE = 8.0
"""A run may take so many times as long as its arrivals: a fleet that cannot follow is late, and
with it the later turns of its sessions."""


@dataclass(frozen=True, slots=True)
class Task:
    """One run to be made."""

    workload: Workload
    reference: Reference
    load: float
    routing: dict[str, Any]
    seconds: float
    """That its arrivals take, in real time."""
    explain: TextIO | None
    """Gets a line for every request."""

    @property
    def policy(self) -> str:
        return str(self.routing["kind"])

    @property
    def asked(self) -> Asked:
        return Asked(self.workload.name, self.load, self.policy, self.pace.simulated)

    @property
    def pace(self) -> Pace:
        simulated_s = self.reference.work_s / NUM_REPLICAS / self.load
        return Pace(self.workload.span_s / self.seconds, simulated_s / self.seconds)

    @property
    def plan(self) -> FleetPlan:
        """What counts as equal times is a real time too, so it shrinks as all others do."""
        requests, speed = self.workload.requests, self.pace.simulated
        tie = {"tie": LeastTtftRouting().tie / speed} if self.policy == "least_ttft" else {}
        longest = max(len(each.token_ids) + each.output_tokens for each in requests)
        return FleetPlan(
            routing=self.routing | tie,
            speed=speed,
            blocks_per_replica=blocks_of_fleet(self.workload) // NUM_REPLICAS,
            max_model_len=longest + WIRE_BLOCK_TOKENS,
        )


def model(task: Task, late_s: float) -> Run:
    """One run in virtual time; `late_s`: as of ModelFleet."""
    fleet = ModelFleet(task.workload, task.plan, task.pace, late_s)
    outcomes = fleet.run()
    return run_of(task.asked, outcomes, NUM_REPLICAS, Reading(fleet.busy_s(), None))


def measured(task: Task) -> Run:
    """One run with processes of its own."""
    with runtime_dir() as directory:
        return uvloop.run(measure(task, directory))


async def measure(task: Task, directory: Path) -> Run:
    """One run, whose sockets and logs lie in a directory."""
    async with running_fleet(task.plan, directory) as fleet:
        bodies = [
            each.http(fleet.url, fleet.model, explain=task.explain is not None)
            for each in task.workload.requests
        ]
        loop = OpenLoop(
            task.workload, bodies, fleet.url, task.pace, limit_s=PATIENCE * task.seconds
        )
        before, began = fleet.cpu_s(), time.perf_counter()
        outcomes = await _watched(fleet, loop)
        late = sorted(outcome.late_s for outcome in outcomes)
        reading = await fleet.reading(
            before, time.perf_counter() - began, late[int(0.99 * (len(late) - 1))]
        )
    if task.explain is not None:
        _explain(task, outcomes, task.explain)
    return run_of(task.asked, outcomes, NUM_REPLICAS, reading)


async def _watched(fleet: Fleet, loop: OpenLoop) -> list[Outcome]:
    async with asyncio.TaskGroup() as tasks:
        watch = tasks.create_task(fleet.watch())
        outcomes = await loop.run()
        watch.cancel()
    return outcomes


def _explain(task: Task, outcomes: Sequence[Outcome], file: TextIO) -> None:
    run = {"trace": task.workload.name, "load": task.load, "policy": task.policy}
    for outcome in outcomes:
        line = run | asdict(outcome)
        line["route"] = json.loads(outcome.route) if outcome.route else None
        file.write(json.dumps(line) + "\n")


def measure_all(
    args: argparse.Namespace, say: Console, explain: TextIO | None
) -> Iterator[tuple[Run, Reference]]:
    """Run by run, in the order of the table."""
    for chosen in SLICES:
        if args.trace and chosen.trace not in args.trace:
            continue
        workload = load_workload(args.traces, chosen, args.requests)
        reference = one_big_cache(workload, blocks_of_fleet(workload), StepTiming())
        seconds = args.seconds or chosen.seconds
        for load in args.load or LOADS:
            for policy in args.policy or POLICIES:
                task = Task(
                    workload, reference, load, {"kind": policy}, seconds, explain
                )  # fmt: skip
                run = model(task, args.late / 1e3) if args.model else measured(task)
                say.print(
                    f"{title(run)}, {policy}: hit rate {run.late_hit_rate:.1%}, TTFT mean "
                    f"{run.late_ttft.mean_s:.2f} s, p99 {run.late_ttft.p99_s:.2f} s, "
                    f"{run.lost} lost {'; '.join(run.faults)}"
                )
                yield run, reference


def show(runs: Sequence[Run], references: dict[str, Reference]) -> None:
    print(markdown(runs, references))
    for line in (LEGEND, *machine_lines(runs), *verdicts(runs, references)):
        print(line)


def main() -> int:
    """Exit code 0 also when an aim is missed: the figures say so. Ctrl-C ends with what there is
    so far."""
    parser = _parser()
    args = parser.parse_args()
    check_traces(parser, args.traces)
    runs: list[Run] = []
    references: dict[str, Reference] = {}
    with contextlib.ExitStack() as files:
        explain = files.enter_context(open(args.explain, "w")) if args.explain else None
        try:
            for run, reference in measure_all(args, Console(stderr=True), explain):
                runs.append(run)
                references[run.trace] = reference
        except KeyboardInterrupt:
            print("stopped before it was done")
    show(runs, references)
    if args.markdown:
        Path(args.markdown).write_text(markdown(runs, references))
    write_json(
        args.json,
        {
            "machine": machine(),
            "is_model": args.model,
            "replicas": NUM_REPLICAS,
            "capacity_share": CAPACITY_SHARE,
            "timing": asdict(StepTiming()),
            "slices": [asdict(each) for each in SLICES],
            "one_big_cache": {name: asdict(each) for name, each in references.items()},
            "runs": [asdict(run) | {"faults": run.faults} for run in runs],
            "aims": verdicts(runs, references),
        },
    )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.routing",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    traces = [each.trace for each in SLICES]
    add = parser.add_argument
    add_traces(parser)
    add("--trace", action="append", choices=traces, help="only this one (repeat)")
    add("--policy", action="append", choices=POLICIES, help="only this one (repeat)")
    add("--load", action="append", type=float, help="only this one, such as 0.65 (repeat)")
    add("--requests", type=int, help="of each slice (1600 of agents, 2400 of the others)")
    add("--seconds", type=float, help="that arrivals take, in real time (30)")
    add("--model", action="store_true", help="in virtual time, without a gateway (minutes)")
    add("--late", type=float, default=0.0, metavar="MS", help="of --model: see routing_model.py")
    add("--json", metavar="FILE")
    add("--markdown", metavar="FILE", help="the table, for the documentation")
    add("--explain", metavar="FILE", help="a line for every request, with its routing decision")
    return parser


if __name__ == "__main__":
    sys.exit(main())

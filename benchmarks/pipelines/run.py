"""Predicted against measured step time of pipelines, on two local ranks of one thread each.

    python -m benchmarks.pipelines.run                   # four minutes on two idle cores
    python -m benchmarks.pipelines.run --quick --out F   # few steps, one model

The machine is measured first (`shardwright profile`), and the operators that dominate at their
local sizes, as `plan --machine here --time-operators` does. Of each model, the fastest pipeline of
two groups is found for each schedule, and steps of all of them are taken in turn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

import shardwright as sw
from benchmarks import record
from benchmarks.estimates.models import MODELS
from benchmarks.estimates.places import Local
from benchmarks.estimates.worker import SEED
from shardwright.ir.graph import Graph
from shardwright.ir.layout import Mesh
from shardwright.ir.plan import Plan
from shardwright.machine.model import Machine
from shardwright.plan_io.plan_text import plan_to_json
from shardwright.planner.meshes.mesh_loop import MeshLoop
from shardwright.planner.plans.simulated.time_refinement import TimeRefinement
from shardwright.planner.space_factory import SpaceFactory
from shardwright.planner.tables.hot_ops import hot_calls
from shardwright.profile.local_ranks import silent
from shardwright.profile.op_timings import with_timings
from shardwright.profile.timing_cache import TimingCache
from shardwright.program.plan_decoder import read_plan
from shardwright.program.step.lower.plan_lowering import PlanLowering
from shardwright.rules.analysis import analyze

HERE = Path(__file__).parent
SUBJECTS = ("gpt2", "vgg")
GROUPS, MICRO_BATCHES = 2, 4
SCHEDULES = (
    ("GPipe", 1),
    ("1F1B", 1),
    ("Interleaved1F1B", 2),
    ("InterleavedZeroBubble", 1),
    ("ZBVZeroBubble", 2),
)


def plans_of(graph: Graph, machine: Machine) -> list[Plan]:
    """The fastest pipeline under each schedule; nothing is recomputed."""
    found, analysis = [], analyze(graph)
    for schedule, each in SCHEDULES:
        rounds = MeshLoop(SpaceFactory(graph, recompute=False), machine)
        mesh = Mesh.parse("dp=1")
        rounds.pipe(
            mesh, GROUPS, MICRO_BATCHES, float("inf"), compare=False, schedule=schedule, each=each
        )
        fastest = min(rounds.found, key=lambda candidate: candidate.point.time)
        plan = fastest.plan(0.0, ())
        decisions = read_plan(plan, graph, analysis)
        lowering = PlanLowering(graph, analysis, decisions, machine.backend_spec.alone_bytes)
        found.append(TimeRefinement(graph, machine).refined(plan, lowering))
    return found


def rows_of(name: str, machine: Machine, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Plan, take steps, compare."""
    torch.manual_seed(SEED)
    model, batch = MODELS[name]()
    graph = sw.capture(model, (), batch)
    with tempfile.TemporaryDirectory() as folder:
        timings = TimingCache(Path(folder) / "timings.sqlite", lambda text: None)
        calls = hot_calls(graph, analyze(graph), plans_of(graph, machine))
        machine = with_timings(machine, calls, options.operators_seconds, timings, silent)
        plans = plans_of(graph, machine)
        given, out = Path(folder) / "plans.json", Path(folder) / "measured.json"
        given.write_text(json.dumps([plan_to_json(plan) for plan in plans]))
        arguments = ["--model", name, "--plans", str(given), "--out", str(out)]
        arguments += ["--rounds", str(options.rounds), "--seconds", str(options.steps_seconds)]
        Local().run("benchmarks.estimates.worker", *arguments, seconds=4 * options.steps_seconds)
        ranks = json.loads(out.read_text())
    return [
        row(name, plan, [rank[number]["seconds"] for rank in ranks])
        for number, plan in enumerate(plans)
    ]


def row(name: str, plan: Plan, ranks: list[list[float]]) -> dict[str, Any]:
    """One plan: of every step the slower rank counts."""
    low, middle, high = statistics.quantiles([max(step) for step in zip(*ranks, strict=True)], n=4)
    return {
        "model": name,
        "schedule": plan.schedule,
        "stages": plan.stages,
        "micro_batches": plan.micro_batches,
        "predicted_seconds": plan.step_seconds,
        "timeline_seconds": plan.timeline.seconds if plan.timeline else plan.step_seconds,
        "measured_seconds": middle,
        "error": plan.step_seconds / middle - 1,
        "spread": (high - low) / middle,
        "steps": len(ranks[0]),
    }


def main() -> None:
    """Measure, compare, write."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=25, help="steps of each plan, at most")
    parser.add_argument("--seconds", type=float, default=15.0, help="to measure the machine")
    parser.add_argument("--steps-seconds", type=float, default=45.0, help="for a model's steps")
    parser.add_argument("--operators-seconds", type=float, default=10.0, help="to time operators")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=HERE / "result.json")
    options = parser.parse_args()
    subjects = SUBJECTS[:1] if options.quick else SUBJECTS
    if options.quick:
        options.rounds, options.seconds, options.steps_seconds = 4, 6.0, 10.0
        options.operators_seconds = 4.0
    machine = Local().machine(options.seconds)
    rows = []
    for name in subjects:
        for one in rows_of(name, machine, options):
            rows.append(one)
            print(
                f"{name:6} {one['schedule']:22} {one['predicted_seconds'] * 1e3:7.1f} ms predicted,"
                f" {one['timeline_seconds'] * 1e3:7.1f} on the timeline,"
                f" {one['measured_seconds'] * 1e3:7.1f} measured ({one['error']:+.0%}, spread"
                f" {one['spread']:.0%})",
                flush=True,
            )
    errors = [abs(one["error"]) for one in rows]
    found = {
        "claim": "step times of pipelines are predicted within 15 %",
        "mean_error": statistics.mean(errors),
        "worst_error": max(errors),
        "rows": rows,
        "peak_flop_per_s": machine.device.peak_flop_per_s("float32"),
    }
    record.write(found, options.out, SEED, tuned=record.TUNE_HOST)


if __name__ == "__main__":
    main()

"""Step time at equal memory: whole layers recomputed, or single operators of them kept.

    python -m benchmarks.recomputation.run -o benchmarks/recomputation/result.json

GPT-2, Llama-8B and ViT-L on 8 H100s, captured on the meta device, on one mesh. Both frontiers are
found by the same search with the same effort; in the first, a recomputed layer keeps nothing.
Evenly spaced plans of both are simulated, and at evenly spaced limits between the least and the
most memory that both have, each gives its fastest plan that fits. Processor seconds are those to
make the space and to search it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import shardwright as sw
from benchmarks import record
from benchmarks.search.models import Built, gpt2, llama, vit
from shardwright.ir.graph import Graph
from shardwright.ir.layout import Mesh
from shardwright.ir.plan import Plan
from shardwright.planner.gc_pause import paused
from shardwright.planner.plans.plan_builder import PlanBuilder
from shardwright.planner.plans.simulated.refinement import Refinement
from shardwright.planner.space.assembly import FREE, SEARCHED, Skeleton
from shardwright.planner.space_factory import SpaceFactory
from shardwright.solve.frontier.fast import Effort, fast_frontier
from shardwright.tracing.op_memory.footprints import Footprints

SEED = 0
MACHINE, MESH = "8xH100", "dp=8"
LIMITS, PLANS = 6, 64  # of each frontier, evenly spaced
MODELS: dict[str, Callable[[], Built]] = {
    "GPT-2": lambda: gpt2(12, 64),
    "Llama-8B, 8 layers": lambda: llama(8, 16),
    "ViT-L": lambda: vit(24, 64),
}
KINDS = {"layers": FREE, "operators": SEARCHED}
_EFFORT = Effort(max_weights=40, max_points=64, resolution=1e-3)


@paused()
def searched(
    graph: Graph, machine: sw.Machine, skeleton: Skeleton, mesh: str = MESH
) -> tuple[list[Plan], dict[str, float]]:
    """The simulated plans of the frontier on one mesh, and the processor seconds of the search."""
    start = time.process_time()
    factory = SpaceFactory(graph, recompute=True)
    space, short = factory.space(machine, Mesh.parse(mesh), "adamw", 1, skeleton=skeleton)
    found = fast_frontier(space.folded, _EFFORT, solver=space.solver, prices=space.prices)
    seconds = time.process_time() - start
    builder = PlanBuilder(space, graph, short, "adamw")
    on_cpu = machine.backend_spec.device == "cpu"
    refinement = Refinement(graph, machine, "adamw", Footprints(on_cpu=on_cpu))
    last = len(found.points) - 1
    points = [
        found.points[i] for i in sorted({round(i * last / (PLANS - 1)) for i in range(PLANS)})
    ]
    plans = [
        refinement.compared(builder.plan(point, peak, 0.0, "", ()))
        for point, peak in zip(points, builder.peaks(points), strict=True)
    ]
    return plans, {"seconds": seconds}


def fastest(plans: Sequence[Plan], limit: int) -> dict[str, Any]:
    """The fastest plan whose simulated memory fits into `limit`."""
    plan = min((p for p in plans if p.peak_bytes <= limit), key=lambda p: p.step_seconds)
    return {
        "seconds": plan.step_seconds,
        "bytes": plan.peak_bytes,
        "kept": sum(op.kept and op.seconds > 0 for op in plan.ops),
        "recomputed": sum(op.runs_again for op in plan.ops),
    }


def measure(name: str) -> dict[str, Any]:
    """Both frontiers of one model."""
    with torch.device("meta"):
        model, batch = MODELS[name]()
    graph, machine = sw.capture(model, (), batch), sw.Machine.preset(MACHINE)
    found = {kind: searched(graph, machine, skeleton) for kind, skeleton in KINDS.items()}
    peaks = [[plan.peak_bytes for plan in plans] for plans, _ in found.values()]
    least, most = max(map(min, peaks)), min(map(max, peaks))
    limits = [least + (most - least) * i // (LIMITS - 1) for i in range(LIMITS)]
    rows = [
        {"limit": limit} | {kind: fastest(plans, limit) for kind, (plans, _) in found.items()}
        for limit in limits
    ]
    return {"limits": rows, "searches": {kind: search for kind, (_, search) in found.items()}}


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    args = parser.parse_args()
    models = {}
    for name in args.models:
        models[name] = measure(name)
        print(name, models[name]["searches"], flush=True)
        for row in models[name]["limits"]:
            print(row, flush=True)
    if args.output:
        result = {"machine planned for": MACHINE, "mesh": MESH, "models": models}
        record.write(result, args.output, SEED)


if __name__ == "__main__":
    main()

"""The k-cut as a result of `search`: its plan, beside the baselines."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from shardwright.ir.graph import Graph
from shardwright.ir.layout import Mesh
from shardwright.ir.op_memory import OpTracer
from shardwright.ir.options.mixed_precision import stored_bytes
from shardwright.machine.model import Machine
from shardwright.planner.kcut.cutter import Cuts, Cutter
from shardwright.planner.plans.plan_builder import PlanBuilder
from shardwright.planner.plans.searched_frontier import SearchedFrontier
from shardwright.planner.plans.simulated.refinement import Refinement
from shardwright.planner.space.repeats import ShortGraph
from shardwright.solve.elimination.pricing import PriceList

NAME = "k-cut"


def kcut_frontier(
    graph: Graph,
    machine: Machine,
    optimizer: str,
    mesh: Mesh,
    tracer: OpTracer,
    joint: Callable[[], SearchedFrontier],
    progress: Callable[[str, float], None] | None = None,
) -> SearchedFrontier:
    """A frontier of one plan: SoyBean's k-cut along the axes of `mesh`, outermost first.

    The plan minimises communicated bytes and is priced like every plan. `joint` is a search that
    provides the baselines and the lower bound.

    Raises:
        CutError: the mesh has more axes than can be cut.
    """
    start = time.perf_counter()
    cutter = Cutter(graph, machine, optimizer)

    def report_cut(done: int) -> None:
        if progress:
            progress(f"cut {mesh.names[done]}={mesh.shape[done]}", done / len(mesh.axes))

    cuts = cutter.cut(mesh, progress=report_cut)
    space = cutter.space(cuts)
    writer = PlanBuilder(space, graph, ShortGraph(graph, (), (), {}, {}), optimizer)
    point = PriceList.of(space.folded).point((0,) * len(space.problem.nodes))
    (peak,) = writer.peaks([point])
    other = joint()
    plan = writer.plan(point, peak, other.bound(peak), NAME, _notes(cuts, graph))
    plan = Refinement(graph, machine, optimizer, tracer).settled(plan)
    if progress:
        progress("done", 1.0)
    seconds = time.perf_counter() - start
    return replace(
        other,
        plans=(plan,),
        least=None,
        off_frontier=None,
        chooses_baselines=False,
        search_seconds=seconds,
    )


def _notes(cuts: Cuts, graph: Graph) -> tuple[str, ...]:
    gradients = 2 * (cuts.mesh.size - 1) * sum(stored_bytes(graph, name) for name in graph.trained)
    parts = " + ".join(f"{moved:,.0f}" for moved in cuts.crossing)
    notes = [
        f"SoyBean's k-cut: one axis after the other, each cut so that the fewest bytes cross it;"
        f" {cuts.bytes:,.0f} bytes in all devices by SoyBean's measure ({parts}), and data parallel"
        f" gradients alone would be {gradients:,} bytes; time and memory were not optimised",
        "the lower bound is that of the joint search over the meshes of the baselines, with nothing"
        " recomputed",
    ]
    if cuts.pinned:
        shown = ", ".join(cuts.pinned[:5])
        more = f" and {len(cuts.pinned) - 5} more" if len(cuts.pinned) > 5 else ""
        notes.append(f"the graph is too wide to cut exactly; pinned heuristically: {shown}{more}")
    return tuple(notes)

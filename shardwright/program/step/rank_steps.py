"""Step programs of the ranks of a plan, from its decisions alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardwright.ir.graph import Graph
from shardwright.ir.layout import Mesh
from shardwright.ir.pipeline import Pipeline
from shardwright.ir.plan import PlanError
from shardwright.program.decisions import Decisions
from shardwright.program.lower.inplace import in_place
from shardwright.program.step.instructions import StepProgram
from shardwright.program.step.lowering import lower_step
from shardwright.program.step.micro_batches import micro_batched_step
from shardwright.program.step.optimize import PASSES, Pass, optimized
from shardwright.rules.analysis import Analysis
from shardwright.rules.micro_batches import MicroBatches, micro_batches, undivided_batch

PASSES_BY_NAME: Mapping[str, Sequence[Pass]] = {"all": PASSES, "naive": ()}


def check_rank(pipeline: Pipeline | None, mesh: Mesh, rank: int) -> None:
    """Raise `PlanError` for a plan with stages, and for a rank that its mesh does not have."""
    if pipeline is not None:
        raise PlanError(
            "plans with pipeline stages do not run as step programs yet; give a plan without stages"
        )
    if not 0 <= rank < mesh.size:
        raise PlanError(
            f"rank {rank} is none of the plan's {mesh.size} ranks; give 0 to {mesh.size - 1}"
        )


def batches_of(graph: Graph, analysis: Analysis, decisions: Decisions) -> MicroBatches:
    """The micro-batches of a step; a whole batch is one."""
    if decisions.micro_batches == 1:
        return undivided_batch(graph, analysis)
    return micro_batches(graph, analysis, decisions.micro_batches)


def step_program(
    graph: Graph,
    analysis: Analysis,
    decisions: Decisions,
    rank: int,
    passes: Sequence[Pass] = PASSES,
) -> StepProgram:
    """The step program of `rank` after `passes`.

    Raises `PlanError` as `check_rank` does.
    """
    check_rank(decisions.pipeline, decisions.mesh, rank)
    batches = batches_of(graph, analysis, decisions)
    step = micro_batched_step(graph, analysis, batches, decisions, rank, in_place)
    return optimized(lower_step(step), passes)

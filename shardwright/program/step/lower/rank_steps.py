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
from shardwright.program.step.lower.lowering import LoweringInput, lower_step
from shardwright.program.step.lower.micro_batches import micro_batched_step
from shardwright.program.step.lower.whole_batch import whole_step
from shardwright.program.step.optimize import STEP_PASSES, Pass, optimized
from shardwright.rules.analysis import Analysis
from shardwright.rules.micro_batches import micro_batches

PASSES_BY_NAME: Mapping[str, Sequence[Pass]] = {"all": STEP_PASSES, "naive": ()}


def check_rank(pipeline: Pipeline | None, mesh: Mesh, rank: int) -> None:
    """Raise `PlanError` for a plan with stages, and for a rank that its mesh does not have."""
    if pipeline is not None:
        raise PlanError(
            "programs of plans with pipeline stages are not printed yet; give a plan without stages"
        )
    if not 0 <= rank < mesh.size:
        raise PlanError(
            f"rank {rank} is none of the plan's {mesh.size} ranks; give 0 to {mesh.size - 1}"
        )


def step_of(graph: Graph, analysis: Analysis, decisions: Decisions, rank: int) -> LoweringInput:
    """The input of the lowering of the step of `rank`."""
    if decisions.micro_batches == 1:
        return whole_step(graph, analysis, decisions, rank, in_place)
    batches = micro_batches(graph, analysis, decisions.micro_batches)
    return micro_batched_step(graph, analysis, batches, decisions, rank, in_place)


def step_program(
    graph: Graph,
    analysis: Analysis,
    decisions: Decisions,
    rank: int,
    passes: Sequence[Pass] = STEP_PASSES,
) -> StepProgram:
    """The step program of `rank` after `passes`.

    Raises `PlanError` as `check_rank` does.
    """
    check_rank(decisions.pipeline, decisions.mesh, rank)
    return optimized(lower_step(step_of(graph, analysis, decisions, rank)), passes)

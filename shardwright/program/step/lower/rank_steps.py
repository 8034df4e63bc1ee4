"""Step programs of the ranks of a plan, from its decisions alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardwright.ir.graph import Graph
from shardwright.ir.layout import Mesh
from shardwright.ir.pipeline import Pipeline
from shardwright.ir.plan import PlanError
from shardwright.program.decisions import Decisions
from shardwright.program.lower.inplace import in_place
from shardwright.program.lower.pipeline import StagedGraph
from shardwright.program.step.async_pipeline.lowering import STAGE_PASSES
from shardwright.program.step.async_pipeline.stage_programs import stage_programs
from shardwright.program.step.lower.lowering import lower_step
from shardwright.program.step.lower.micro_batches import micro_batched_step
from shardwright.program.step.lower.pipelines.pipeline import lower_pipeline
from shardwright.program.step.lower.step_builder import LoweringInput
from shardwright.program.step.lower.whole_batch import whole_step
from shardwright.program.step.optimize import PASSES, STEP_PASSES, Pass, optimized
from shardwright.program.step.step_program import StepProgram
from shardwright.rules.analysis import Analysis
from shardwright.rules.micro_batches import micro_batches

PASSES_BY_NAME: Mapping[str, Sequence[Pass]] = {"all": STEP_PASSES, "naive": ()}


def check_rank(pipeline: Pipeline | None, mesh: Mesh, rank: int) -> None:
    """Raise `PlanError` for a rank that the plan does not have.

    `mesh` is that of layouts: in a pipeline that of one group.
    """
    ranks = mesh.size * (1 if pipeline is None else pipeline.groups)
    if not 0 <= rank < ranks:
        raise PlanError(f"rank {rank} is none of the plan's {ranks} ranks; give 0 to {ranks - 1}")


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
    """The step program of `rank` after `passes`; of an asynchronous pipeline that of a call.

    Raises `PlanError` as `check_rank` does.
    """
    check_rank(decisions.pipeline, decisions.mesh, rank)
    if decisions.pipeline is None:
        return optimized(lower_step(step_of(graph, analysis, decisions, rank)), passes)
    staged = StagedGraph(graph, analysis, decisions)
    if staged.weights is not None:
        chosen = STAGE_PASSES if passes is STEP_PASSES else passes
        return stage_programs(staged, rank, chosen).call
    # Its results are summed behind everything else, so none is made later.
    chosen = PASSES if passes is STEP_PASSES else passes
    return optimized(lower_pipeline(staged, rank, in_place), chosen)
